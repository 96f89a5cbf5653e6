"""Rollouts for reinforcement learning over a cluster: tokens and exact log probabilities."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.text.tokenizer import Tokenizer
from pagewire.tests.support.local_cluster import ONE_ROUTER, LocalCluster, local_cluster
from pagewire.tests.support.logprob_truth import LogprobTruth
from pagewire.tests.support.sse import events_of
from pagewire.tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(240)

ROUNDING = 2e-5  # see test_llm_rollouts.py
PROMPT = [(n * 37) % 900 + 10 for n in range(75)]  # longer than what a decode worker computes
MESSAGES = [{"role": "user", "content": "What is a lambda, and what is it good for? " * 3}]
TEMPERATURE = 1.4
ASKED = {
    "model": "tiny",
    "return_token_ids": True,
    "temperature": TEMPERATURE,
    "seed": 5,
    "max_tokens": 40,
    "ignore_eos": True,
}
CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 0}
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture(scope="module")
def truth(path: Path) -> LogprobTruth:
    """Of a random model with the demo's vocabulary: its samples are not the likeliest tokens."""
    demo = demo_model_path()
    size = Tokenizer.from_dir(demo).vocab_size
    theirs = write_tiny_model(path, "qwen3", "groups-of-2-odd-vocabulary", vocab_size=size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path / name)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return LogprobTruth(theirs)


@pytest.fixture(scope="module")
def cluster(path: Path, truth: LogprobTruth) -> Iterator[LocalCluster]:
    options = ("--prefill", "1", "--decode", "1", "--device", "cpu", "--dtype", "float32")
    with local_cluster("--model", str(path), *ONE_ROUTER, *options) as running:
        yield running


def post(cluster: LocalCluster, route: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{cluster.url}/v1/{route}", json={**ASKED, **body}, timeout=60)
    assert response.is_success, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(cluster: LocalCluster, route: str, **body: Any) -> list[dict[str, Any]]:
    asked = {**ASKED, **body, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/{route}", json=asked, timeout=60) as response:
        return list(events_of(response.iter_bytes()))


def check(truth: LogprobTruth, prompt: list[int], tokens: list[int], values: list[float]) -> None:
    rows = truth.of([*prompt, *tokens])[len(prompt) - 1 : -1]
    wanted = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    assert values == pytest.approx(wanted, abs=ROUNDING)
    assert (np.float32(values).astype(np.float64) == np.array(values)).all()
    assert sum(row.argmax() != token for row, token in zip(rows, tokens, strict=True)) > 20


def test_a_completion_of_tokens(cluster: LocalCluster, truth: LogprobTruth) -> None:
    answer = post(cluster, "completions", prompt=[PROMPT, PROMPT[:50]], n=2, logprobs=0)
    prompts = [PROMPT, PROMPT, PROMPT[:50], PROMPT[:50]]
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert choice["prompt_token_ids"] == prompt
        assert len(choice["token_ids"]) == 40
        check(truth, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])
    assert cluster.total("pagewire_kv_transfer_segments_total") > 0


def test_a_streamed_completion_has_the_same(cluster: LocalCluster, truth: LogprobTruth) -> None:
    asked = {"prompt": PROMPT, "logprobs": 0, "return_tokens_as_token_ids": True}
    [whole] = post(cluster, "completions", **asked)["choices"]
    chunks = [event["choices"][0] for event in stream(cluster, "completions", **asked)]
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in each for each in chunks[1:])
    tokens = [token for each in chunks for token in each.get("token_ids", [])]
    logprobs = [each["logprobs"] for each in chunks if each["logprobs"]]
    names = [name for each in logprobs for name in each["tokens"]]
    assert tokens == whole["token_ids"]
    assert names == whole["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    assert [[name] for name in names] == [list(top) for top in whole["logprobs"]["top_logprobs"]]
    check(truth, PROMPT, tokens, [value for each in logprobs for value in each["token_logprobs"]])


def test_a_chat_whole_and_streamed(cluster: LocalCluster, truth: LogprobTruth) -> None:
    asked = {"messages": MESSAGES, "return_tokens_as_token_ids": True, **CHAT_LOGPROBS}
    whole = post(cluster, "chat/completions", **asked, n=2)
    prompt = whole["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    for choice in whole["choices"]:
        content = choice["logprobs"]["content"]
        tokens = choice["token_ids"]
        assert [each["token"] for each in content] == [f"token_id:{token}" for token in tokens]
        check(truth, prompt, tokens, [each["logprob"] for each in content])
        # Text and names of tokens do not always give the tokens again: the ids do.
        again = post(cluster, "completions", prompt=[*prompt, *tokens], max_tokens=1)
        assert again["choices"][0]["prompt_token_ids"] == [*prompt, *tokens]

    first, *others = stream(cluster, "chat/completions", **asked)
    assert first["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in event for event in others)
    chunks = [event["choices"][0] for event in (first, *others)]
    tokens = [token for each in chunks for token in each.get("token_ids", [])]
    parts = [each["logprobs"]["content"] for each in chunks if each["logprobs"]]
    assert tokens == whole["choices"][0]["token_ids"]
    check(truth, prompt, tokens, [each["logprob"] for part in parts for each in part])


def test_processed_ones_are_of_the_temperature(cluster: LocalCluster, truth: LogprobTruth) -> None:
    asked = {"prompt": PROMPT, "logprobs": 0, "logprobs_mode": "processed"}
    [choice] = post(cluster, "completions", **asked)["choices"]
    tokens = choice["token_ids"]
    rows = truth.of([*PROMPT, *tokens])[len(PROMPT) - 1 : -1] / TEMPERATURE
    wanted = rows.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=ROUNDING)


def test_a_stop_keeps_tokens_and_log_probabilities_together(cluster: LocalCluster) -> None:
    [free] = post(cluster, "completions", prompt=PROMPT, logprobs=0)["choices"]
    stop = free["token_ids"][20]
    asked = {"prompt": PROMPT, "logprobs": 0, "stop_token_ids": [stop]}
    [choice] = post(cluster, "completions", **asked)["choices"]
    assert choice["finish_reason"] == "stop"
    end = 1 + free["token_ids"].index(stop)
    assert choice["token_ids"] == free["token_ids"][:end]
    assert len(choice["logprobs"]["token_logprobs"]) == end
    json.dumps(choice, allow_nan=False)
