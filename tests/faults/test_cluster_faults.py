"""Workers die and clients leave: every request that stays is answered rightly, nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable

import httpx
import pytest

from pagewire.tests.support.aio import run_async
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_body, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters

pytestmark = pytest.mark.timeout(240)

MAX_TOKENS = 48
DISCONNECT_SECONDS = float(os.environ.get("PAGEWIRE_TEST_DISCONNECT_S", "8"))
WORKERS = 3


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=1, decode=2)


@pytest.fixture(scope="module")
def expected() -> GreedyPrompts:
    return greedy_prompts(MAX_TOKENS, 40)


def _ask(
    cluster: LocalCluster,
    prompts: GreedyPrompts,
    trouble: Callable[[], None] | None = None,
    after_s: float = 0.0,
) -> None:
    run_async(prompts.ask(cluster.url, timeout=90, trouble=trouble, after_s=after_s), 180)


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
    cluster: LocalCluster, expected: GreedyPrompts, name: str
) -> None:
    pid, epoch = cluster.worker_pid(name), _epoch(cluster, name)
    deaths = cluster.output.count(f"{name} died")
    _ask(cluster, expected, trouble=lambda: os.kill(pid, signal.SIGKILL), after_s=0.7)
    _wait_for_workers(cluster, WORKERS, epoch, name)
    assert cluster.output.count(f"{name} died") == deaths + 1
    _ask(cluster, expected[:8])
    cluster.wait_idle(WORKERS)


def test_a_frozen_prefill_worker_costs_no_request(
    cluster: LocalCluster, expected: GreedyPrompts
) -> None:
    pid = cluster.worker_pid("prefill-0")
    try:
        _ask(cluster, expected[::3], trouble=lambda: os.kill(pid, signal.SIGSTOP), after_s=0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.wait_idle(WORKERS, timeout=30)


def test_clients_that_leave_at_random_leave_nothing(
    cluster: LocalCluster, expected: GreedyPrompts
) -> None:
    rng = random.Random(5)

    async def visitor(client: httpx.AsyncClient, deadline: float) -> int:
        visits = 0
        while time.monotonic() < deadline:
            body = greedy_body(rng.choice(expected.prompts), 200, stream=rng.random() < 0.7)
            timeout = rng.uniform(0.005, 0.6)
            try:
                async with asyncio.timeout(timeout):
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
    _ask(cluster, expected[:4])
