"""Workers die and clients leave: every request that stays is answered rightly, nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.model.demo.prompts import standard_prompts
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.local_cluster import LocalCluster, complete_all, local_cluster

pytestmark = pytest.mark.timeout(240)

MAX_TOKENS = 48
DISCONNECT_SECONDS = float(os.environ.get("PAGEWIRE_TEST_DISCONNECT_S", "15"))
WORKERS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster("--prefill", "1", "--decode", "2", "--device", "cpu") as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and their greedy tokens by one process."""
    llm = LLM("demo", device="cpu")
    assert llm.tokenizer is not None
    prompts = standard_prompts(llm.tokenizer)[:40]
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return prompts, [output.token_ids for output in llm.generate(prompts, greedy)]


def _body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "model": "pagewire-demo",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def _complete_while(
    cluster: LocalCluster, prompts: list[list[int]], trouble: Any, after_s: float
) -> list[list[int]]:
    async def main() -> list[dict[str, Any]]:
        async def make_trouble() -> None:
            await asyncio.sleep(after_s)
            trouble()

        bodies = [_body(prompt) for prompt in prompts]
        task = asyncio.create_task(make_trouble())
        answers = await complete_all(cluster.url, bodies, 8, timeout=90)
        await task
        return answers

    answers = run_async(main(), 180)
    return [answer["choices"][0]["token_ids"] for answer in answers]


def _wait_for_workers(cluster: LocalCluster, count: int, old_epoch: int, name: str) -> None:
    deadline = time.monotonic() + 40
    while True:
        services = {service["id"]: service for service in cluster.health().get("services", [])}
        if len(services) == count and services.get(name, {}).get("epoch", old_epoch) != old_epoch:
            return
        assert time.monotonic() < deadline, f"{name} did not come back: {services}"
        time.sleep(0.3)


def _epoch(cluster: LocalCluster, name: str) -> int:
    return next(s["epoch"] for s in cluster.health()["services"] if s["id"] == name)


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
def test_a_killed_worker_costs_no_request_and_comes_back(
    cluster: LocalCluster, expected: tuple[list[list[int]], list[list[int]]], name: str
) -> None:
    prompts, truth = expected
    pid, epoch = cluster.worker_pid(name), _epoch(cluster, name)
    got = _complete_while(cluster, prompts, lambda: os.kill(pid, signal.SIGKILL), after_s=0.7)
    different = [i for i, (a, b) in enumerate(zip(got, truth, strict=True)) if a != b]
    assert not different
    _wait_for_workers(cluster, WORKERS, epoch, name)
    assert f"{name} died" in cluster.output
    again = _complete_while(cluster, prompts[:8], lambda: None, after_s=0)
    assert again == truth[:8]
    cluster.wait_idle(WORKERS)


def test_a_frozen_prefill_worker_costs_no_request(
    cluster: LocalCluster, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, truth = expected
    pid = cluster.worker_pid("prefill-0")
    try:
        got = _complete_while(
            cluster, prompts[::3], lambda: os.kill(pid, signal.SIGSTOP), after_s=0.5
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    assert got == truth[::3]
    cluster.wait_idle(WORKERS, timeout=30)


def test_clients_that_leave_at_random_leave_nothing_behind(
    cluster: LocalCluster, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, truth = expected
    rng = random.Random(5)

    async def visitor(client: httpx.AsyncClient, deadline: float) -> int:
        visits = 0
        while time.monotonic() < deadline:
            body = _body(rng.choice(prompts), stream=rng.random() < 0.7, max_tokens=200)
            patience = rng.uniform(0.005, 0.6)
            try:
                async with asyncio.timeout(patience):
                    async with client.stream(
                        "POST", f"{cluster.url}/v1/completions", json=body
                    ) as response:
                        async for _line in response.aiter_lines():
                            pass
            except TimeoutError:
                visits += 1
        return visits

    async def main() -> int:
        deadline = time.monotonic() + DISCONNECT_SECONDS
        async with httpx.AsyncClient(timeout=30) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(visitor(client, deadline)) for _ in range(8)]
        return sum(task.result() for task in tasks)

    assert run_async(main(), DISCONNECT_SECONDS + 60) > 20
    cluster.wait_idle(WORKERS)
    metrics = cluster.metrics()
    running = [v for k, v in metrics.items() if k.startswith("pagewire_requests_running")]
    assert not any(running)
    assert _complete_while(cluster, prompts[:4], lambda: None, after_s=0) == truth[:4]
