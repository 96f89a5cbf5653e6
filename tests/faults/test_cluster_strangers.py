"""Strangers at every TCP port that a cluster on a CPU opens, while it serves."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.tests.support.aio import run_async
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_prompts
from pagewire.tests.support.hostile_bytes import hostile_bytes
from pagewire.tests.support.listening import listening_sockets
from pagewire.tests.support.local_cluster import LocalCluster
from pagewire.tests.support.strangers import Stranger
from pagewire.tests.support.tcp_relay import (
    REAL_HOST,
    RELAY_HOST,
    RELAYED_ENV,
    Recorder,
    recording,
)

SECONDS = float(os.environ.get("PAGEWIRE_TEST_STRANGERS_S", "20"))
pytestmark = pytest.mark.timeout(SECONDS + 180)

WORKERS = 2
PORTS = 1 + 2 * WORKERS + 1  # the router's; control and metrics of each; the decode worker's for KV
MAX_TOKENS = 24
SEED = 20
MIN_VISITS = 10  # of each stranger
# What a process may have open, and take of memory, more than before
SPARE_FILES, SPARE_MIB = 10, 128


class Marker:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def listening(cluster: LocalCluster) -> list[tuple[str, int]]:
    pids = [cluster.process.pid, *cluster.processes()]
    return sorted((str(address), port) for address, port in listening_sockets(pids))


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[LocalCluster, Recorder]]:
    cluster = LocalCluster("--prefill", "1", "--decode", "1", "--device", "cpu", env=RELAYED_ENV)
    with recording(lambda: [port for _, port in listening(cluster)]) as recorder:
        try:
            cluster.wait_ready()
            yield cluster, recorder
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def cluster(recorded: tuple[LocalCluster, Recorder]) -> LocalCluster:
    return recorded[0]


@pytest.fixture(scope="module")
def expected() -> GreedyPrompts:
    return greedy_prompts(MAX_TOKENS, 16)


def usage(cluster: LocalCluster) -> dict[int, tuple[int, int]]:
    """Open files and resident MiB of each process of the cluster."""
    found = {}
    for pid in cluster.processes():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[pid] = (len(os.listdir(f"/proc/{pid}/fd")), pages * resource.getpagesize() >> 20)
    return found


def test_a_cluster_opens_known_ports_of_loopback_alone(cluster: LocalCluster) -> None:
    sockets = listening(cluster)
    assert cluster.port in [port for _, port in sockets]
    assert [address for address, _ in sockets] == [REAL_HOST] * PORTS


def test_bytes_of_strangers_on_every_port_do_nothing(
    recorded: tuple[LocalCluster, Recorder], expected: GreedyPrompts, tmp_path: Path
) -> None:
    cluster, recorder = recorded
    run_async(expected.ask(cluster.url.replace(REAL_HOST, RELAY_HOST), timeout=60), 90)
    cluster.wait_idle(WORKERS)  # asks for the workers' metrics
    sockets = listening(cluster)
    streams = recorder.recorded()
    assert {port for _, port in sockets} == set(streams)
    exploit = pickle.dumps(Marker(tmp_path / "unpickled"))
    before = usage(cluster)

    strangers = []
    for number, (host, port) in enumerate(sockets):
        own, all_ports = streams[port], [each for seen in streams.values() for each in seen]
        for place, samples in enumerate((own, own, all_ports)):
            rng = random.Random(f"{SEED} {number} {place}")
            payloads = hostile_bytes(rng, samples, [exploit])
            strangers.append(Stranger(host, port, payloads, rng))

    async def main() -> int:
        deadline = time.monotonic() + SECONDS
        rounds = 0
        async with asyncio.TaskGroup() as group:
            for stranger in strangers:
                group.create_task(stranger.visit_until(deadline))
            while time.monotonic() < deadline:
                await expected.ask(cluster.url, 4, timeout=60)
                rounds += 1
        return rounds

    rounds = run_async(main(), SECONDS + 120)
    print(f"{rounds} rounds of requests, {sum(each.visits for each in strangers)} visits")
    assert set(cluster.processes()) == set(before), cluster.output
    assert " died" not in cluster.output
    assert all(stranger.visits >= MIN_VISITS for stranger in strangers)
    cluster.wait_idle(WORKERS)
    run_async(expected.ask(cluster.url, timeout=60), 90)
    assert not (tmp_path / "unpickled").exists()
    after = usage(cluster)
    print(before, after)
    for pid, (files, mib) in before.items():
        assert after[pid][0] <= files + SPARE_FILES, (before, after)
        assert after[pid][1] <= mib + SPARE_MIB, (before, after)
