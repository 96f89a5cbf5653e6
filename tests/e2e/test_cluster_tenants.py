"""Two API keys at one cluster: neither learns of the other's prompts, nor waits for its answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagewire.tests.support.aio import wait_until
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(180)

ALICE, BOB = "key-of-alice", "key-of-bob-1"
BATCH = "more than one"
MODEL = "pagewire-demo"
ENDED = "vllm:request_success_total"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice: {ALICE}\nbob: {BOB}\n")
    options = ["--device", "cpu", "--max-num-seqs", "16", "--api-key-file", str(file)]
    with local_cluster(*options) as running:
        yield running


def request_of(api: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request with a text, on one API."""
    messages = [{"role": "user", "content": text}]
    match api:
        case "chat":
            return "/v1/chat/completions", {"messages": messages, "max_tokens": 2, "n": 2}
        case "completion":
            return "/v1/completions", {"prompt": text, "max_tokens": 2}
        case "batch":
            return "/v1/completions", {"prompt": [text, f"{BATCH} {text}"], "max_tokens": 2}
        case "response":
            return "/v1/responses", {"input": text, "max_output_tokens": 2}
        case "message":
            return "/v1/messages", {"messages": messages, "max_tokens": 2}
    return "/v1/embeddings", {"input": text}


def cached_tokens(cluster: LocalCluster, key: str, api: str, text: str) -> int:
    """Return how many tokens of a request's prompts were cached, as its usage says."""
    path, body = request_of(api, text)
    body["model"] = MODEL
    answer = httpx.post(cluster.url + path, json=body, headers={"x-api-key": key}, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(usage.get("cache_read_input_tokens") or details.get("cached_tokens") or 0)


@pytest.mark.parametrize("api", ["chat", "completion", "batch", "response", "message"])
def test_usage_tells_a_key_only_what_it_has_sent_itself(cluster: LocalCluster, api: str) -> None:
    text = f"A secret for {api}. " + "The with statement wraps the execution of a block. " * 12
    for key in (ALICE, BOB):
        assert cached_tokens(cluster, key, api, text) == 0
        assert cached_tokens(cluster, key, api, text) >= 64


def test_chats_are_answered_while_another_keys_flood_runs(cluster: LocalCluster) -> None:
    """The flood is one request of 256 answers, each of 256 tokens, for 16 device slots."""
    flood = {
        "model": MODEL,
        "prompt": [f"Flood {number}" for number in range(64)],
        "n": 4,
        "max_tokens": 256,
        "ignore_eos": True,
        "stream": True,
    }
    before, headers = cluster.total(ENDED), {"x-api-key": ALICE}
    url = f"{cluster.url}/v1/completions"
    with httpx.stream("POST", url, json=flood, headers=headers, timeout=60) as running:
        events = running.iter_lines()
        next(events)  # it has tokens
        for number in range(4):
            for api in ("chat", "batch", "embedding"):
                cached_tokens(cluster, BOB, api, f"Question {number}")
        assert cluster.total(ENDED) - before < 64 + 4 * 4  # a quarter of the flood, and the chats
        next(events)
    wait_until(lambda: not any(cluster.used_blocks().values()))


def test_embeddings_tell_nothing(cluster: LocalCluster) -> None:
    found = [cached_tokens(cluster, key, "embedding", "word " * 99) for key in (ALICE, ALICE, BOB)]
    assert found == [0, 0, 0]
