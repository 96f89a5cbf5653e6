"""Answers with every sampling parameter go on with the same tokens when their worker dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.local_cluster import LocalCluster, complete_all, local_cluster
from pagewire.tests.support.shaped_requests import shaped_fields

pytestmark = pytest.mark.timeout(240)

COUNT, MAX_TOKENS = 48, 200
PROMPTS = [[n * 37 % 1000 + 10 + i for n in range(5 + 7 * i % 90)] for i in range(COUNT)]
GENERATED = "pagewire_tokens_generated_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    options = ("--prefill", "1", "--decode", "2", "--device", "cpu", "--dtype", "float32")
    with local_cluster(*options) as running:
        yield running


def fields_of(index: int) -> dict[str, Any]:
    """A third greedy, a third seeded, a third shaped."""
    if index % 3 == 2:
        return shaped_fields(index // 3)
    return {"temperature": 0.0} if index % 3 else {"temperature": 0.9, "seed": index}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM("demo", device="cpu", dtype="float32")
    params = [
        SamplingParams(**fields_of(index), max_tokens=MAX_TOKENS, ignore_eos=True)
        for index in range(COUNT)
    ]
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


def ask_all(cluster: LocalCluster) -> list[list[int]]:
    bodies = [
        {
            "model": "pagewire-demo",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields_of(index),
        }
        for index, prompt in enumerate(PROMPTS)
    ]
    answers = run_async(complete_all(cluster.url, bodies, COUNT), 200)
    return [answer["choices"][0]["token_ids"] for answer in answers]


def test_answers_keep_their_tokens_when_their_decode_worker_dies(
    cluster: LocalCluster, expected: list[list[int]]
) -> None:
    assert ask_all(cluster) == expected
    generated = cluster.total(GENERATED)
    migrated = cluster.total("pagewire_request_migrations_total")
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(ask_all, cluster)
        deadline = time.monotonic() + 60
        while cluster.total(GENERATED) - generated < COUNT * MAX_TOKENS // 4:
            assert time.monotonic() < deadline
        os.kill(cluster.worker_pid("decode-1"), signal.SIGKILL)
        again = answered.result()
    different = [i for i, (a, b) in enumerate(zip(again, expected, strict=True)) if a != b]
    assert not different, [(i, fields_of(i)) for i in different]
    assert cluster.total("pagewire_request_migrations_total") - migrated >= COUNT // 8
