"""Two routers that accept from one socket: both serve, and one that dies takes no others along."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_body, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, SharedClusters
from pagewire.tests.support.sse import arriving_events

pytestmark = pytest.mark.timeout(240)

MAX_TOKENS = 32
CLIENTS = 24
LOAD_S = 8.0
KILL_AFTER_S = 2.0
ROUTERS = ("router-0", "router-1")
WORKERS = 2


@pytest.fixture(scope="module")
def cluster(shared_clusters: SharedClusters) -> LocalCluster:
    return shared_clusters.get(prefill=0, decode=2)


@pytest.fixture(scope="module")
def expected() -> GreedyPrompts:
    return greedy_prompts(MAX_TOKENS, CLIENTS)


@dataclass(frozen=True)
class Outcome:
    """One request.

    Attributes:
        began: by the monotonic clock.
        tokens: None if its connection broke.
    """

    number: int
    began: float
    tokens: list[int] | None


async def stream_one(client: httpx.AsyncClient, prompts: GreedyPrompts, number: int) -> Outcome:
    """Ask for one answer; a status other than 200 fails the test."""
    began, tokens = time.monotonic(), []
    body = greedy_body(prompts.prompts[number], MAX_TOKENS, stream=True)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for event in arriving_events(response):
                tokens += event["choices"][0]["token_ids"]
    except httpx.TransportError:
        return Outcome(number, began, None)
    return Outcome(number, began, tokens)


async def ask_for(seconds: float, url: str, prompts: GreedyPrompts) -> list[Outcome]:
    """Let each client ask one request after the other over a connection of its own."""
    until, outcomes = time.monotonic() + seconds, []

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            while True:
                outcomes.append(await stream_one(http, prompts, number))
                if time.monotonic() > until:
                    return

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
    return outcomes


def generated(cluster: LocalCluster) -> dict[str, float]:
    """Return the tokens that each router has streamed."""
    pattern = r'vllm:generation_tokens_total\{.*router="(.*?)"'
    found = [(re.match(pattern, name), value) for name, value in cluster.metrics().items()]
    return {match[1]: value for match, value in found if match is not None}


def check(outcomes: list[Outcome], prompts: GreedyPrompts) -> None:
    wrong = [each for each in outcomes if each.tokens not in (None, prompts.tokens[each.number])]
    assert wrong == []


def test_both_serve(cluster: LocalCluster, expected: GreedyPrompts) -> None:
    before = generated(cluster)
    outcomes = run_async(ask_for(0, cluster.url, expected), 120)
    assert len(outcomes) == CLIENTS
    assert all(each.tokens is not None for each in outcomes)
    check(outcomes, expected)
    tokens = {name: n - before.get(name, 0) for name, n in generated(cluster).items()}
    assert sum(tokens.values()) == CLIENTS * MAX_TOKENS
    assert min(tokens[name] for name in ROUTERS) >= 2 * MAX_TOKENS, tokens
    assert cluster.health()["status"] == "ok"


def test_one_that_is_killed_under_load_cuts_its_own_connections_alone(
    cluster: LocalCluster, expected: GreedyPrompts
) -> None:
    async def main() -> tuple[list[Outcome], float]:
        load = asyncio.create_task(ask_for(LOAD_S, cluster.url, expected))
        await asyncio.sleep(KILL_AFTER_S)
        pid = cluster.router_pid(ROUTERS[0])
        os.kill(pid, signal.SIGKILL)
        # Its connections are open until then: a client may still send a request over one.
        await eventually(lambda: not Path(f"/proc/{pid}").exists())
        gone = time.monotonic()
        return await load, gone

    outcomes, gone = run_async(main(), 180)
    check(outcomes, expected)
    cut = [each for each in outcomes if each.tokens is None]
    assert 0 < len(cut) < CLIENTS
    assert len({each.number for each in cut}) == len(cut), "a client was cut off twice"
    assert all(each.began <= gone for each in cut), (gone, cut)
    assert len(outcomes) > 2 * CLIENTS
    cluster.wait_for_line(f"{ROUTERS[0]} is ready again", 30)
    assert f"{ROUTERS[1]} died" not in cluster.output
    cluster.wait_idle(WORKERS)


def test_it_serves_again_afterwards(cluster: LocalCluster, expected: GreedyPrompts) -> None:
    assert {each["id"] for each in cluster.health()["routers"]} == set(ROUTERS)
    deadline = time.monotonic() + 60
    while not generated(cluster).get(ROUTERS[0]):
        assert time.monotonic() < deadline
        outcomes = run_async(ask_for(0, cluster.url, expected), 120)
        assert all(each.tokens is not None for each in outcomes)
        check(outcomes, expected)


def test_the_metrics_of_the_cluster_are_those_of_both(cluster: LocalCluster) -> None:
    pages = [generated(cluster) for _ in range(8)]
    assert all(page == pages[0] for page in pages)
    assert set(pages[0]) == set(ROUTERS)
