"""Strangers at every TCP port that a cluster opens, while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from pagewire.loadtest.cluster import START_TIMEOUT_S
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.greedy_prompts import GreedyPrompts
from pagewire.tests.support.hostile_bytes import hostile_bytes
from pagewire.tests.support.local_cluster import LocalCluster, listening_sockets
from pagewire.tests.support.tcp_relay import (
    REAL_HOST,
    RELAY_HOST,
    RELAYED_ENV,
    Recorder,
    recording,
)

WORKERS = 2
ROUTERS = 2
# HTTP; operators; metrics of each router; control, metrics and KV of each worker
PORTS = 2 + ROUTERS + 3 * WORKERS
UNUSED = 1  # nobody sends KV to the prefill worker
SEED = 20
IN_FLIGHT = 4
MIN_VISITS = 10  # of each stranger
SPARE_FILES, SPARE_MIB = 10, 128  # by which open files and memory of a process may grow

FLOOD = 48  # connections at once
CALL_S = 2.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops what was not sent, and resets
Manner = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]

_REFUSALS = (OSError, TimeoutError)  # the server may end a connection at any point


class Stranger:
    """Connects to one port again and again.

    Attributes:
        visits: number of visits so far, also of those that the port did not accept.
    """

    def __init__(self, host: str, port: int, payloads: Iterator[bytes], rng: random.Random) -> None:
        self.host, self.port = host, port
        self.visits = 0
        self._payloads, self._rng = payloads, rng

    async def visit_until(self, deadline: float) -> None:
        """Visit until `time.monotonic()` reaches `deadline`, at least `MIN_VISITS` times."""
        manners = (self._say, self._say, self._hear, self._hesitate, self._hold, self._reset)
        while time.monotonic() < deadline or self.visits < MIN_VISITS:
            self.visits += 1
            if self._rng.random() < 0.01:
                await self._flood()
            else:
                await self._visit(self._rng.choice(manners), next(self._payloads))
            await asyncio.sleep(self._rng.uniform(0, 0.04))

    async def _visit(self, manner: Manner, payload: bytes) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                reader, writer = await asyncio.open_connection(self.host, self.port)
        except _REFUSALS:
            return
        try:
            with contextlib.suppress(*_REFUSALS):
                async with asyncio.timeout(CALL_S):
                    await manner(reader, writer, payload)
        finally:
            if manner == self._reset:
                writer.transport.abort()
            else:
                writer.close()

    async def _say(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        writer.write(payload)
        await writer.drain()

    async def _hear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        """Send all, half of the time also the end of the stream, and read the answer."""
        writer.write(payload)
        await writer.drain()
        if self._rng.random() < 0.5:
            writer.write_eof()
        async with asyncio.timeout(0.3):
            while await reader.read(1 << 16):
                pass

    async def _hesitate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        """Send the beginning, a few bytes at a time."""
        for at in range(0, min(len(payload), 200), 7):
            writer.write(payload[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0.03)

    async def _hold(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        """Send a part, and keep the connection open."""
        writer.write(payload[: self._rng.randint(0, len(payload))])
        await writer.drain()
        await asyncio.sleep(self._rng.uniform(0.1, CALL_S))

    async def _reset(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
    ) -> None:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.write(payload)

    async def _flood(self) -> None:
        """Open many silent connections at once."""

        async def open_one() -> None:
            with contextlib.suppress(*_REFUSALS):
                async with asyncio.timeout(CALL_S):
                    _, writer = await asyncio.open_connection(self.host, self.port)
                    try:
                        await asyncio.sleep(0.3)
                    finally:
                        writer.close()

        await asyncio.gather(*(open_one() for _ in range(FLOOD)))


class Marker:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def listening(cluster: LocalCluster) -> list[tuple[str, int]]:
    """Return address and port of each socket on which the cluster listens."""
    return sorted(listening_sockets([cluster.process.pid, *cluster.processes()]))


@contextmanager
def recorded_cluster(
    *options: str, start_timeout: float = START_TIMEOUT_S
) -> Iterator[tuple[LocalCluster, Recorder]]:
    """Run a prefill and a decode worker, and record what passes through their ports."""
    cluster = LocalCluster("--prefill", "1", "--decode", "1", *options, env=RELAYED_ENV)
    with recording(lambda: [port for _, port in listening(cluster)]) as recorder:
        try:
            cluster.wait_ready(start_timeout)
            yield cluster, recorder
        finally:
            cluster.stop()


def usage(cluster: LocalCluster) -> dict[int, tuple[int, int]]:
    """Return open files and resident MiB of each process of the cluster."""
    processes = map(psutil.Process, cluster.processes())
    return {each.pid: (each.num_fds(), each.memory_info().rss >> 20) for each in processes}


def check_ports(cluster: LocalCluster) -> None:
    """Fail unless the cluster listens on the known ports, and only on loopback."""
    sockets = listening(cluster)
    assert cluster.port in [port for _, port in sockets]
    assert [address for address, _ in sockets] == [REAL_HOST] * PORTS


def let_strangers_in(
    cluster: LocalCluster,
    recorder: Recorder,
    expected: GreedyPrompts,
    seconds: float,
    directory: Path,
) -> None:
    """Send strangers' bytes to each port while requests run; fails if they have any effect.

    Args:
        cluster: the cluster of `recorded_cluster`.
        recorder: its recorder.
        expected: the prompts, and the right answers.
        seconds: duration of the visits.
        directory: folder in which a file appears if a process unpickles a stranger's bytes.
    """
    run_async(expected.ask(cluster.url.replace(REAL_HOST, RELAY_HOST), timeout=60), 90)
    run_async(expected.ask(cluster.url, IN_FLIGHT, timeout=60), 90)
    cluster.wait_idle(WORKERS)
    ports, deadline = {port for _, port in listening(cluster)}, time.monotonic() + 20
    while len(ports - set(recorder.recorded())) > UNUSED and time.monotonic() < deadline:
        cluster.metrics()  # each process is asked over its own port
        httpx.get(f"{cluster.operator_url.replace(REAL_HOST, RELAY_HOST)}/cluster")
    left = directory / "unpickled"
    strangers = make_strangers(cluster, recorder, pickle.dumps(Marker(left)))
    before = usage(cluster)
    rounds = run_async(ask_amid(strangers, cluster, expected, seconds), seconds + 120)
    print(f"{rounds} rounds of requests, {sum(each.visits for each in strangers)} visits")
    assert set(cluster.processes()) == set(before), cluster.output
    assert " died" not in cluster.output
    cluster.wait_idle(WORKERS)
    run_async(expected.ask(cluster.url, timeout=60), 90)
    assert not left.exists()
    after = usage(cluster)
    print(before, after)
    for pid, (files, mib) in before.items():
        assert after[pid][0] <= files + SPARE_FILES, (before, after)
        assert after[pid][1] <= mib + SPARE_MIB, (before, after)


def make_strangers(cluster: LocalCluster, recorder: Recorder, exploit: bytes) -> list[Stranger]:
    """Return three strangers for each port; two have its recorded bytes, one has all ports'."""
    sockets, streams = listening(cluster), recorder.recorded()
    assert len({port for _, port in sockets} - set(streams)) == UNUSED
    strangers, all_ports = [], [each for seen in streams.values() for each in seen]
    for number, (host, port) in enumerate(sockets):
        own = streams.get(port, all_ports)
        for place, samples in enumerate((own, own, all_ports)):
            rng = random.Random(f"{SEED} {number} {place}")
            payloads = hostile_bytes(rng, samples, [exploit])
            strangers.append(Stranger(host, port, payloads, rng))
    return strangers


async def ask_amid(
    strangers: list[Stranger], cluster: LocalCluster, expected: GreedyPrompts, seconds: float
) -> int:
    """Ask everything again and again while strangers come; returns how often."""
    deadline = time.monotonic() + seconds
    rounds = 0
    async with asyncio.TaskGroup() as group:
        visits = [group.create_task(each.visit_until(deadline)) for each in strangers]
        while not all(visit.done() for visit in visits):
            await expected.ask(cluster.url, IN_FLIGHT, timeout=60)
            rounds += 1
    return rounds
