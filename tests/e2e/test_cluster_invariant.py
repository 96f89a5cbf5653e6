"""A batch-invariant cluster: log probabilities are the same bits, whoever computes them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.local_cluster import (
    BY_PREFIX,
    ONE_ROUTER,
    PREDICTED,
    LocalCluster,
    local_cluster,
)
from pagewire.tests.support.sse import events_of
from pagewire.tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(240)

# The second and the last are short enough for a decode worker to compute them itself.
PROMPTS = [
    [(n * 37 + 11 * length) % 1900 + 10 for n in range(length)] for length in (70, 9, 150, 30)
]
TOKENS = 60
# On a busy machine answers can end before the client reads the event at which a worker is killed.
ROUNDS = 5
DTYPE = "bfloat16"  # results that depend on the batch differ most in it
Answer = list[tuple[int, float]]


@dataclass(frozen=True)
class Served:
    """A running cluster, and what it serves."""

    cluster: LocalCluster
    model: str
    name: str
    ranks: int


def write_experts(path: Path) -> str:
    """Write a model with experts, windows and sinks, and the demo model's tokenizer."""
    write_tiny_model(path, "gptoss", "windows-by-layer", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, path / name)
    return str(path)


@pytest.fixture(scope="module", params=["demo", "experts", "two-ranks"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model, name = "demo", "pagewire-demo"
    if request.param == "experts":
        name = "tiny-experts"
        model = write_experts(tmp_path_factory.mktemp("models") / name)
    options = ("--model", model, "--prefill", "1", "--decode", "2", "--device", "cpu")
    options += (
        *ONE_ROUTER,
        "--dtype",
        DTYPE,
        "--batch-invariant",
        "--max-num-batched-tokens",
        "50",
    )
    ranks = 2 if request.param == "two-ranks" else 1
    options += ("--tensor-parallel-size", str(ranks))
    # Under prediction prefill workers decode, too, and decode workers compute prompts.
    env = PREDICTED if request.param == "demo" else BY_PREFIX
    with local_cluster(*options, env=env) as running:
        yield Served(running, model, name, ranks)


def offline_answers(served: Served) -> list[Answer]:
    settings = {"device": "cpu", "dtype": DTYPE, "batch_invariant": True}
    llm = LLM(served.model, tensor_parallel_size=served.ranks, **settings)
    asked = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        for seed in range(len(PROMPTS))
    ]
    return [
        [
            (token, each[token].logprob)
            for token, each in zip(o.token_ids, o.outputs[0].logprobs or [], strict=True)
        ]
        for o in llm.generate(PROMPTS, asked)
    ]


def streamed(served: Served, seed: int, kills_at: int = -1) -> Answer:
    """Return an answer; after some events, kill the worker that has most to do."""
    asked = {
        "model": served.name, "prompt": PROMPTS[seed], "seed": seed, "temperature": 0.9,
        "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
        "stream": True,
    }  # fmt: skip
    cluster = served.cluster
    tokens: list[int] = []
    values: list[float] = []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=asked, timeout=60) as response:
        assert response.status_code == 200
        for count, event in enumerate(events_of(response.iter_bytes())):
            if count == kills_at:
                kill_the_busiest(cluster)
            for choice in event["choices"]:
                tokens += choice.get("token_ids", [])
                values += (choice["logprobs"] or {}).get("token_logprobs", [])
    return list(zip(tokens, values, strict=True))


def kill_the_busiest(cluster: LocalCluster) -> None:
    """Kill the worker whose sequences hold the most KV blocks; none if all have answered."""
    name, blocks = max(cluster.used_blocks().items(), key=lambda used: used[1])
    if blocks:
        os.kill(cluster.worker_pid(name), signal.SIGKILL)


def test_answers_are_those_of_an_engine_even_if_their_worker_dies(served: Served) -> None:
    truth = offline_answers(served)
    seeds = range(len(PROMPTS))
    assert [streamed(served, seed) for seed in seeds] == truth
    for _ in range(ROUNDS):
        served.cluster.wait_whole()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(streamed, [served] * len(PROMPTS), seeds, [20, -1, -1, -1]))
        assert together == truth
        if served.cluster.total("pagewire_request_migrations_total"):
            return
    pytest.fail(f"in {ROUNDS} rounds no answer was unfinished when its worker was killed")
