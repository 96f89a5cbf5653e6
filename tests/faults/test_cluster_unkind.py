"""Unkind clients, a lost router, a Redis in trouble, a frozen worker.

Each test ends alike: requests are answered rightly, no worker holds a block.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable

import httpx
import pytest

from pagewire.tests.support.aio import run_async
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_body, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters

pytestmark = pytest.mark.timeout(120)

MAX_TOKENS = 32
WORKERS = 2


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=1, decode=1)


@pytest.fixture(scope="module")
def expected() -> GreedyPrompts:
    return greedy_prompts(MAX_TOKENS, 16)


class Expectation:
    """A cluster and what it must answer."""

    def __init__(self, cluster: LocalCluster, expected: GreedyPrompts) -> None:
        self.cluster = cluster
        self.expected = expected

    def answers_rightly(self, while_: Callable[[], None] | None = None, in_flight: int = 8) -> int:
        """Ask everything, with trouble alongside; returns how many prompt tokens were cached."""
        asked = self.expected.ask(self.cluster.url, in_flight, timeout=60, trouble=while_)
        answers = run_async(asked, 90)
        self.cluster.wait_idle(WORKERS, timeout=20)
        usages = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        return sum(usages)


@pytest.fixture
def asked(cluster: LocalCluster, expected: GreedyPrompts) -> Expectation:
    return Expectation(cluster, expected)


def wait_until(cluster: LocalCluster, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, cluster.output
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**9),
        ("stop", [f"stop {i}" for i in range(10_000)]),
        ("logit_bias", {str(i): 1 for i in range(100_000)}),
        ("prompt", ["a"] * 1_000_000),
        ("prompt", [1] * 1_000_000),
        ("prompt", [1, 2, 10**6]),
        ("prompt", [1, 2, 2**70]),
        ("prompt", "word " * 500_000),
        ("stop_token_ids", [1] * 500_000),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else None,
)
def test_what_has_no_bound_is_refused_at_once(
    cluster: LocalCluster, field: str, value: object
) -> None:
    body = greedy_body([5, 6, 7], MAX_TOKENS) | {field: value}
    started = time.monotonic()
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert len(response.content) < 1000
    assert time.monotonic() - started < 10


def test_readers_that_hardly_read_hold_nobody_up(asked: Expectation) -> None:
    body = json.dumps(greedy_body([5, 6, 7], 4000, stream=True)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    readers = []
    try:
        for _ in range(4):
            reader = socket.socket()
            readers.append(reader)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect(("127.0.0.1", asked.cluster.port))
            reader.sendall(head.encode() + body)
        run_async(asked.expected.ask(asked.cluster.url, timeout=60), 90)
        assert all(reader.recv(1) == b"H" for reader in readers)
    finally:
        for reader in readers:
            reader.close()
    asked.answers_rightly()


def test_half_of_many_choices_cancelled_leaves_the_other_half(asked: Expectation) -> None:
    prompts, tokens = asked.expected.prompts, asked.expected.tokens
    order = [0, len(prompts) - 1] * 2
    body = greedy_body([5], MAX_TOKENS, n=3) | {"prompt": [prompts[i] for i in order]}

    async def one(client: httpx.AsyncClient, timeout: float) -> list[list[int]] | None:
        try:
            async with asyncio.timeout(timeout):
                response = await client.post(f"{asked.cluster.url}/v1/completions", json=body)
        except TimeoutError:
            return None
        return [choice["token_ids"] for choice in response.json()["choices"]]

    async def main() -> list[list[list[int]] | None]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(one(client, timeout) for timeout in (0.1, 60, 0.3, 60)))

    for answer in run_async(main(), 90)[1::2]:
        assert answer == [tokens[i] for i in order for _ in range(3)]
    asked.answers_rightly()


def test_a_killed_router_comes_back_and_its_requests_are_cancelled(asked: Expectation) -> None:
    cluster = asked.cluster
    with httpx.stream(
        "POST",
        f"{cluster.url}/v1/completions",
        json=greedy_body([5, 6, 7], 4000, stream=True),
        timeout=30,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        [name] = cluster.busy_routers()
        os.kill(cluster.router_pid(name), signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    wait_until(cluster, lambda: f"{name} is ready again" in cluster.output)
    cluster.wait_idle(WORKERS)
    asked.answers_rightly()


def test_a_killed_redis_costs_cache_hits_for_a_while_alone(asked: Expectation) -> None:
    cluster = asked.cluster
    asked.answers_rightly()
    pid = cluster.pid_of("redis.sock")
    asked.answers_rightly(while_=lambda: os.kill(pid, signal.SIGKILL))
    wait_until(
        cluster,
        lambda: cluster.health()["redis"] == "up" and "redis is ready again" in cluster.output,
    )
    assert asked.answers_rightly() > 0


def test_a_frozen_redis_costs_no_request(asked: Expectation) -> None:
    cluster = asked.cluster
    pid = cluster.pid_of("redis.sock")
    body = greedy_body([5, 6, 7], 4000, stream=True)
    try:
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
            next(response.iter_lines())
            time.sleep(2.5)  # by now the record in Redis speaks of its blocks, and will for long
            os.kill(pid, signal.SIGSTOP)
        cluster.wait_idle(WORKERS)
        asked.answers_rightly()
        asked.answers_rightly()
    finally:
        os.kill(pid, signal.SIGCONT)
    asked.answers_rightly()


def test_requests_outlast_a_frozen_decode_worker(asked: Expectation) -> None:
    pid = asked.cluster.worker_pid("decode-0")

    def freeze() -> None:
        time.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(12)  # longer than its lease, and than an engine may be silent
        os.kill(pid, signal.SIGCONT)

    # All at once: later ones would rightly be refused, for there is no other worker.
    asked.answers_rightly(while_=freeze, in_flight=len(asked.expected.prompts))
    asked.answers_rightly()
    assert asked.cluster.worker_pid("decode-0") == pid
