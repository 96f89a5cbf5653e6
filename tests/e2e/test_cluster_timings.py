"""Where a request's time went, as a real cluster of prefill and decode workers says.

`test_cluster_killed.py` has an answer that changes its decode worker.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.kv.packing import packed_bytes
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters

pytestmark = pytest.mark.timeout(180)

BLOCK = 16
NUM_TOKENS = 300
EPSILON_MS = 0.01  # each number is rounded


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=1, decode=1)


def prompt_of(first: int) -> list[int]:
    """A prompt that begins as no other does."""
    return [first, *(10 + each % 500 for each in range(NUM_TOKENS - 1))]


def ask(cluster: LocalCluster, headers: dict[str, str] | None = None, **body: Any) -> Any:
    body = {"model": "pagewire-demo", "temperature": 0, "ignore_eos": True, **body}
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_parts_of_a_remote_prefill(cluster: LocalCluster) -> None:
    timings = ask(cluster, prompt=prompt_of(600), max_tokens=20, timings=True).json()["timings"]
    [choice] = timings["choices"]
    prefill, transfer, decode = choice["prefill"], choice["transfer"], choice["decode"]
    assert choice["workers"] == ["prefill-0", "decode-0"]
    assert choice["migrations"] == 0
    assert choice["cached"] == {
        "tokens": 0, "worker": "prefill-0", "is_local": False, "decode_worker_tokens": 0,
    }  # fmt: skip
    assert prefill["worker"] == "prefill-0"
    assert prefill["chunks"] == 1
    assert decode["worker"] == "decode-0"
    assert decode["steps"] == 19
    before = timings["router_ms"] + choice["placed_ms"] + decode["queued_ms"]
    parts = before + prefill["queued_ms"] + prefill["ms"]
    assert 0 < prefill["ms"] < parts <= timings["first_token_ms"] + EPSILON_MS
    assert transfer["transport"] == "zmq"
    assert transfer["after_first_token_ms"] <= decode["ms"]
    assert transfer["ms"] > 0
    total = timings["first_token_ms"] + decode["ms"]
    assert total == pytest.approx(timings["total_ms"], abs=5)
    assert decode["mean_step_ms"] * 19 == pytest.approx(decode["ms"], abs=0.1)
    assert decode["mean_step_ms"] <= decode["p99_step_ms"] <= decode["ms"]


def test_the_bytes_are_those_of_the_blocks(cluster: LocalCluster) -> None:
    timings = ask(cluster, prompt=prompt_of(601), max_tokens=2, timings=True).json()["timings"]
    transfer = timings["choices"][0]["transfer"]
    model = json.loads((demo_model_path() / "config.json").read_text())
    layers, heads, width = (
        model[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    layout = KvLayout.of([None] * layers, CachedToken(2, heads, width), BLOCK, "float32")
    assert transfer["segments"] >= 1
    assert transfer["bytes"] == packed_bytes(layout, -(-NUM_TOKENS // BLOCK))


def test_a_second_request_says_where_its_prompt_was_cached(cluster: LocalCluster) -> None:
    first, second = (
        ask(cluster, prompt=prompt_of(602) + more, max_tokens=2, timings=True).json()["timings"]
        for more in ([], list(range(100, 160)))
    )
    assert first["choices"][0]["cached"]["tokens"] == 0
    [choice] = second["choices"]
    whole = NUM_TOKENS // BLOCK * BLOCK
    assert choice["cached"] == {
        "tokens": whole, "worker": "prefill-0", "is_local": False, "decode_worker_tokens": whole,
    }  # fmt: skip
    # The decode worker holds those blocks: only the others are sent.
    sent = first["choices"][0]["transfer"]["bytes"], choice["transfer"]["bytes"]
    assert 0 < sent[1] < sent[0] / 3


def test_a_short_prompt_is_computed_by_the_decode_worker(cluster: LocalCluster) -> None:
    timings = ask(cluster, prompt=[603, 5, 6, 7], max_tokens=4, timings=True).json()["timings"]
    [choice] = timings["choices"]
    assert choice["workers"] == ["decode-0"]
    assert choice["transfer"] is None
    assert choice["prefill"]["worker"] == "decode-0"
    assert choice["prefill"]["chunks"] == 1
    assert choice["cached"]["is_local"]


def test_a_streams_last_chunk_has_them_and_no_other(cluster: LocalCluster) -> None:
    header = {"x-pagewire-timings": "1"}
    response = ask(cluster, header, prompt=prompt_of(604), max_tokens=4, stream=True)
    *others, last = events(response)
    assert not any("timings" in each for each in others)
    assert last["choices"] == []
    assert "usage" not in last
    assert last["timings"]["choices"][0]["transfer"]["segments"] >= 1


def test_a_stop_string_ends_an_answer_with_timings(cluster: LocalCluster) -> None:
    prompt = prompt_of(605)
    text = ask(cluster, prompt=prompt, max_tokens=24).json()["choices"][0]["text"]
    body = ask(
        cluster, prompt=[606, *prompt], max_tokens=200, stop=list(set(text))[:16], timings=True
    ).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["timings"]["choices"][0]["prefill"]["worker"] == "prefill-0"


def test_a_stop_string_in_the_first_token_ends_an_answer_with_timings(
    cluster: LocalCluster,
) -> None:
    asked = {"prompt": prompt_of(606), "max_tokens": 200, "timings": True}
    first_token = ask(cluster, **{**asked, "max_tokens": 1}).json()["choices"][0]["text"]
    body = ask(cluster, **asked, stop=[first_token], cache_salt="another tenant").json()
    assert body["choices"][0]["text"] == ""
    assert body["timings"]["choices"][0]["prefill"]["worker"] == "prefill-0"


def test_each_of_several_answers_has_its_own(cluster: LocalCluster) -> None:
    timings = ask(cluster, prompt=prompt_of(607), max_tokens=6, n=2, timings=True).json()["timings"]
    first, second = timings["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["prefill"]["worker"] == "prefill-0"
    assert second["prefill"]["worker"] == "decode-0"  # it has forked from the first
    assert second["workers"] == ["decode-0"]


CHATS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
}


@pytest.mark.parametrize("by_header", [False, True], ids=["field", "header"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", CHATS)
def test_every_route_has_them(
    cluster: LocalCluster, path: str, stream: bool, by_header: bool
) -> None:
    body = {"model": "pagewire-demo", "stream": stream, **CHATS[path]}
    header = {"x-pagewire-timings": "1"} if by_header else {}
    body |= {} if by_header else {"timings": True}
    response = httpx.post(f"{cluster.url}{path}", json=body, headers=header, timeout=60)
    assert response.status_code == 200, response.text
    if stream:
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        *others, last = [line for line in lines if "message_stop" not in line]
        assert not any("timings" in each for each in others)
        found = json.loads(last.removeprefix("data: "))
        found = found.get("response", found)
    else:
        found = response.json()
    assert 0 < found["timings"]["first_token_ms"] <= found["timings"]["total_ms"]
    assert found["timings"]["choices"][0]["workers"][-1] == "decode-0"


def test_nothing_is_said_where_nobody_asks(cluster: LocalCluster) -> None:
    assert "timings" not in ask(cluster, prompt=prompt_of(608), max_tokens=2).json()


def test_a_wrong_value_is_refused(cluster: LocalCluster) -> None:
    url, body = f"{cluster.url}/v1/completions", {"model": "pagewire-demo", "prompt": "a"}
    by_header = httpx.post(url, json=body, headers={"x-pagewire-timings": "yes"}, timeout=60)
    by_field = httpx.post(url, json={**body, "timings": 1}, timeout=60)
    for response, param in ((by_header, "x-pagewire-timings"), (by_field, "timings")):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
