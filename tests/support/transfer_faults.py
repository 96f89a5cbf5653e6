"""Faults at named points of transfers, in a cluster of two prefill and two decode workers.

A cell is a point of `fault_points`, a signal, and the side of the transfer whose process gets it
from the worker that is at the point. While it happens, clients ask for completions whose tokens are
known. SIGSTOP comes twice: for a moment, and until the others have given the process up and, if it
is the sender, another one has filled the slot that it was about to write to.

    python -P -m pagewire.tests.support.transfer_faults --device cuda \\
        --transport ipc --transport ucx --clusters 2 --out FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fault_board import (
    RECEIVER_POINTS,
    SENDER_POINTS,
    FaultBoard,
    Order,
)
from pagewire.tests.support.fault_points import CARRIER, DIRECTORY, PROGRAM
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_body, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster
from pagewire.tests.support.memory_carrier import MemoryCarrier

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LINKS = 2  # of each worker
MEMORY = MemoryCarrier.name
MAX_TOKENS = 12
PROMPT_TOKENS = range(33, 701)
IN_FLIGHT = 8
MAX_PASSES = 8
BRIEF_S = 0.3
START_TIMEOUT_S = 240.0  # several clusters that compile their kernels at once
FIRE_TIMEOUT_S = GIVE_UP_TIMEOUT_S = REUSE_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 60.0
CELL_TIMEOUT_S = 150.0
MAX_FAILURES = 3  # of a cluster's cells, before the rest is left out
SLOT_BYTES = (
    4 * 32 << 10
)  # four of the demo model's blocks, so that most jobs have several segments
SETTINGS = {
    "PAGEWIRE_HEARTBEAT_S": "0.5",
    "PAGEWIRE_LEASE_S": "2",
    "PAGEWIRE_TRANSFER_TIMEOUT_S": "2",
    "PAGEWIRE_PREFILL_TIMEOUT_S": "4",
    "PAGEWIRE_STAGING_SLOTS": "8",
    "PAGEWIRE_STAGING_SLOT_BYTES": str(SLOT_BYTES),
}
COUNTED = {  # how the sample's name starts
    "corrupt": 'pagewire_kv_transfer_segments_total{direction="received",outcome="corrupt"',
    "dropped": 'pagewire_kv_transfer_segments_total{direction="received",outcome="dropped"',
    "lost": 'pagewire_kv_transfer_segments_total{direction="sent",outcome="lost"',
    "stray": 'pagewire_kv_link_faults_total{kind="stray"',
}


@dataclass(frozen=True)
class Cell:
    """A point, a signal, and whose process gets it.

    Attributes:
        side: "sender" or "receiver".
    """

    point: str
    signal: signal.Signals
    side: str

    def __str__(self) -> str:
        return f"{self.point:12} {self.signal.name} {self.side:8}"

    @property
    def role(self) -> str:
        """Of the worker that reaches the point."""
        return "prefill" if self.point in SENDER_POINTS else "decode"

    @property
    def is_to_peer(self) -> bool:
        """Whether the worker at the point signals the other one."""
        return (self.side == "sender") is (self.role == "decode")


CELLS = tuple(
    itertools.starmap(
        Cell,
        itertools.product(
            SENDER_POINTS + RECEIVER_POINTS,
            (signal.SIGKILL, signal.SIGSTOP),
            ("sender", "receiver"),
        ),
    )
)


def few_cells() -> list[Cell]:
    """Return a cell of each point; each signal and side come together twice."""
    return [CELLS[4 * index + index % 4] for index in range(8)]


@dataclass
class CellResult:
    """What came of a cell.

    Attributes:
        targets: workers that got the signal.
        num_reused: stopped senders that went on when another one had filled their slot.
        counts: of `COUNTED`, without those of workers that were killed.
        problem: why it failed.
    """

    cell: str
    num_requests: int = 0
    seconds: float = 0.0
    targets: list[str] = field(default_factory=list)
    num_reused: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    def __str__(self) -> str:
        counts = " ".join(f"{name} {count:g}" for name, count in self.counts.items() if count)
        return (
            f"{self.cell} {','.join(self.targets):22} {self.num_requests:4d} requests "
            f"{self.seconds:5.1f} s reused {self.num_reused} {counts}"
            f"{'FAILED: ' + self.problem if self.problem else ''}"
        )


class Clients:
    """Ask for completions until both enough is asked and nobody wants more.

    Attributes:
        num_answered: rightly.
    """

    def __init__(self, url: str, prompts: GreedyPrompts, numbers: itertools.count[int]) -> None:
        self._url, self._prompts, self._numbers = url, prompts, numbers
        self.num_asked = self.num_answered = 0

    @asynccontextmanager
    async def asking(self, at_least: int) -> AsyncIterator[None]:
        """Ask meanwhile, and then for what is missing; a failed request or wrong token raises."""
        self._missing = at_least
        self._goes_on = True
        limits = httpx.Limits(max_connections=IN_FLIGHT)
        async with (
            httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(IN_FLIGHT):
                group.create_task(self._ask(client))
            yield
            self._goes_on = False

    async def _ask(self, client: httpx.AsyncClient) -> None:
        prompts = self._prompts
        while self._goes_on or self.num_asked < self._missing:
            self.num_asked += 1
            index = next(self._numbers) % len(prompts.prompts)
            body = greedy_body(prompts.prompts[index], prompts.max_tokens)
            response = await client.post(f"{self._url}/v1/completions", json=body)
            assert response.status_code == 200, response.text
            tokens = response.json()["choices"][0]["token_ids"]
            assert tokens == prompts.tokens[index], f"prompt {index}: wrong tokens {tokens}"
            self.num_answered += 1


class FaultyCluster:
    """A running cluster in which cells are played, one after the other."""

    def __init__(
        self, cluster: LocalCluster, board: FaultBoard, prompts: GreedyPrompts, seed: int
    ) -> None:
        self._cluster, self._board, self._prompts = cluster, board, prompts
        self._random, self._orders = random.Random(seed), itertools.count()
        self._numbers, self._turns = itertools.count(seed), Counter[str]()

    async def warm_up(self) -> None:
        """Ask for a few completions, for which the moves' kernels are compiled."""
        pids = self._pids()
        async with Clients(self._cluster.url, self._prompts, self._numbers).asking(IN_FLIGHT):
            pass
        await self._wait_settled(pids, set())

    async def play(self, cell: Cell, num_requests: int) -> CellResult:
        """Play one cell; what goes wrong is noted in the result."""
        result, began = CellResult(str(cell)), time.monotonic()
        try:
            async with asyncio.timeout(CELL_TIMEOUT_S):
                await self._play(cell, num_requests, result)
        except (Exception, ExceptionGroup) as exc:  # noqa: BLE001 - the other cells are played, too
            result.problem = _words(exc)
        result.seconds = time.monotonic() - began
        return result

    async def _play(self, cell: Cell, num_requests: int, result: CellResult) -> None:
        before, counts = self._pids(), self._fault_counts()
        clients = Clients(self._cluster.url, self._prompts, self._numbers)
        try:
            async with clients.asking(num_requests):
                if cell.signal == signal.SIGKILL:
                    await self._strike(cell, result, self._kill)
                else:
                    await self._strike(cell, result, self._stop_briefly)
                    await self._strike(cell, result, self._stop_for_long)
        finally:
            result.num_requests = clients.num_answered
            for pid in before.values():  # whatever has gone wrong: none stays stopped
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        killed = set(result.targets) if cell.signal == signal.SIGKILL else set()
        await self._wait_settled(before, killed)
        result.counts = {
            name: max(0, count - counts[name]) for name, count in self._fault_counts().items()
        }

    async def _strike(
        self, cell: Cell, result: CellResult, then: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Have a worker carry out an order, and do what comes after it."""
        worker = f"{cell.role}-{self._turns[cell.role] % 2}"
        self._turns[cell.role] += 1
        order = Order(
            number=next(self._orders),
            point=cell.point,
            passes=self._random.randrange(MAX_PASSES),
            signal=cell.signal,
            to_peer=cell.is_to_peer,
            until_reused=then == self._stop_for_long and cell.side == "sender",
        )
        names = {pid: name for name, pid in self._pids().items()}
        self._board.post(worker, order)
        try:
            fired = await self._event(FIRE_TIMEOUT_S, "fired", order=order.number)
        finally:
            self._board.withdraw(worker)
        result.targets.append(names[fired["target"]])
        result.num_reused += await then(fired)

    async def _kill(self, fired: dict[str, Any]) -> int:
        """Nothing: the supervisor starts it again."""
        return 0

    async def _stop_briefly(self, fired: dict[str, Any]) -> int:
        await asyncio.sleep(BRIEF_S)
        os.kill(fired["target"], signal.SIGCONT)
        return 0

    async def _stop_for_long(self, fired: dict[str, Any]) -> int:
        """Let it go on once its peer has given it up, and its slot is used again."""
        target = fired["target"]
        is_sender, has_slot = target == fired["sender"], fired["credit"] >= 0
        peer = fired["receiver"] if is_sender else fired["sender"]
        await self._event(GIVE_UP_TIMEOUT_S, "closed", after=fired, by=peer, peer=target)
        if is_sender and has_slot:  # the receiver has it go on
            await self._event(REUSE_TIMEOUT_S, "reused", after=fired)
        else:
            os.kill(target, signal.SIGCONT)
        return int(is_sender and has_slot)

    async def _event(
        self, timeout_s: float, event: str, *, after: dict[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Wait for an event with these fields; returns it."""
        wanted = {"event": event, **fields}
        since = 0.0 if after is None else after["at"]
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for found in self._board.events():
                if found["at"] >= since and wanted.items() <= found.items():
                    return found
            await asyncio.sleep(0.02)
        raise TimeoutError(f"not within {timeout_s:g} s: {wanted}")

    async def _wait_settled(self, before: dict[str, int], killed: set[str]) -> None:
        """Wait until killed workers are back, all are linked, and no block is held."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (missing := await asyncio.to_thread(self._unsettled, before, killed)) is not None:
            assert time.monotonic() < deadline, missing
            await asyncio.sleep(0.1)
        changed = {name for name, pid in self._pids().items() if before[name] != pid}
        assert changed == killed, f"other processes than {killed}: {changed}"
        errors = self._sum("pagewire_kv_integrity_errors_total")
        assert not errors, "the block accounting is wrong"

    def _unsettled(self, before: dict[str, int], killed: set[str]) -> str | None:
        """Return what is not yet as it should be."""
        try:
            pids, metrics = self._pids(), self._cluster.metrics()
        except (httpx.HTTPError, AssertionError) as exc:
            return str(exc)
        if old := [name for name in killed if pids.get(name) == before[name]]:
            return f"not started again: {old}"
        health = self._cluster.health()
        ready = {each["id"] for each in health["services"] if each.get("state") == "ready"}
        if not ready.issuperset(WORKERS):
            return f"only {ready} are ready"
        for name, wanted in (("pagewire_kv_links", LINKS), ("pagewire_kv_blocks", 0)):
            found = {
                key: value
                for key, value in metrics.items()
                if key.startswith(name + "{") and ("state" not in key or 'state="used"' in key)
            }
            if len(found) != len(WORKERS) or set(found.values()) != {wanted}:
                return f"{name} is not {wanted} everywhere: {found}"
        return None

    def _pids(self) -> dict[str, int]:
        return {name: self._cluster.worker_pid(name) for name in WORKERS}

    def _sum(self, start: str) -> float:
        metrics = self._cluster.metrics()
        return sum(value for name, value in metrics.items() if name.startswith(start))

    def _fault_counts(self) -> dict[str, float]:
        return {name: self._sum(start) for name, start in COUNTED.items()}


def _words(exc: BaseException) -> str:
    """Return an exception's text; of a group, the first one's."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return f"{type(exc).__name__}: {exc}"


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        transport: "zmq", "ipc", "ucx", or on the CPU "memory".
        out: folder for results, and for the logs of clusters in which a cell failed.
        cuda_graphs: workers take longer to start.
    """

    device: str
    transport: str
    num_requests: int
    seed: int
    out: Path | None = None
    cuda_graphs: bool = False

    def cluster_options(self) -> list[str]:
        """Return the options of `pagewire up`."""
        return [
            *("--prefill", "2", "--decode", "2", "--device", self.device, "--dtype", "float32"),
            *("--kv-transport", "zmq" if self.transport == MEMORY else self.transport),
            *("--kv-network", "private"),
            *("--num-blocks", "2048", "--no-enable-prefix-caching", "--local-prefill-tokens", "0"),
            "--cuda-graphs" if self.cuda_graphs else "--no-cuda-graphs",
        ]


def known_answers() -> GreedyPrompts:
    """Return the prompts that are asked."""
    known = greedy_prompts(MAX_TOKENS)
    fit = [index for index, each in enumerate(known.prompts) if len(each) in PROMPT_TOKENS]
    return GreedyPrompts(
        [known.prompts[index] for index in fit], [known.tokens[index] for index in fit], MAX_TOKENS
    )


def run_cells(cells: Sequence[Cell], options: Options, prompts: GreedyPrompts) -> list[CellResult]:
    """Play cells in one cluster, or in a new one after a cell that failed."""
    results: list[CellResult] = []
    remaining = list(cells)
    while remaining and sum(bool(each.problem) for each in results) < MAX_FAILURES:
        results += _run_until_failure(remaining, options, prompts)
        remaining = list(cells)[len(results) :]
    return results


def _run_until_failure(
    cells: list[Cell], options: Options, prompts: GreedyPrompts
) -> list[CellResult]:
    results: list[CellResult] = []
    with tempfile.TemporaryDirectory(prefix="pw-faults-") as directory:
        env = {**SETTINGS, DIRECTORY: directory, CARRIER: options.transport}
        with local_cluster(
            *options.cluster_options(), env=env, program=PROGRAM, start_timeout=START_TIMEOUT_S
        ) as cluster:
            board = FaultBoard(Path(directory))
            faulty = FaultyCluster(cluster, board, prompts, options.seed)
            run_async(faulty.warm_up(), CELL_TIMEOUT_S)
            for cell in cells:
                result = run_async(faulty.play(cell, options.num_requests), CELL_TIMEOUT_S + 60)
                results.append(result)
                print(f"{options.transport:4} {result}", flush=True)
                if result.problem:
                    _keep_logs(cluster, Path(directory), options, cell)
                    break
    return results


def _keep_logs(cluster: LocalCluster, board: Path, options: Options, cell: Cell) -> None:
    print(cluster.output)
    if options.out is not None:
        name = "-".join([options.transport, cell.point, cell.signal.name, cell.side])
        target = options.out / name
        shutil.copytree(cluster.directory.name, target, dirs_exist_ok=True)
        shutil.copy(board / "events", target)


def summary(transport: str, results: Sequence[CellResult]) -> dict[str, Any]:
    """Return a carrier's totals."""
    counts = Counter[str]()
    for result in results:
        counts.update(result.counts)
    return {
        "transport": transport,
        "cells": len(results),
        "requests": sum(result.num_requests for result in results),
        "reused": sum(result.num_reused for result in results),
        "failed": [result.cell for result in results if result.problem],
        "counts": dict(counts),
    }


def run_carriers(
    cells: Sequence[Cell], options: Sequence[Options], clusters: int = 1
) -> dict[str, list[CellResult]]:
    """Play cells by several carriers at the same time, each in several clusters.

    Returns:
        Their results, by carrier.
    """
    prompts = known_answers()
    with ThreadPoolExecutor(clusters * len(options)) as pool:
        running = {
            each.transport: [
                pool.submit(run_cells, cells[shard::clusters], each, prompts)
                for shard in range(clusters)
            ]
            for each in options
        }
        return {
            transport: [result for future in futures for result in future.result()]
            for transport, futures in running.items()
        }


def main(argv: list[str]) -> int:
    """Run all cells by each carrier; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transport", action="append", choices=["zmq", "ipc", "ucx", MEMORY])
    parser.add_argument("--requests", type=int, default=32, help="a cell, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clusters", type=int, default=1, help="a carrier, at the same time")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="only the first of these")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--out", type=Path, help="a folder for results and logs")
    given = parser.parse_args(argv)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    cells = random.Random(given.seed).sample(CELLS, given.cells)
    options = [
        Options(given.device, transport, given.requests, given.seed, given.out, given.cuda_graphs)
        for transport in given.transport or ["zmq"]
    ]
    began, has_failed = time.monotonic(), False
    for transport, results in run_carriers(cells, options, given.clusters).items():
        total = summary(transport, results)
        print(json.dumps(total), flush=True)
        has_failed |= bool(total["failed"]) or total["cells"] < len(cells)
        if given.out is not None:
            lines = [json.dumps(each) for each in (*map(asdict, results), total)]
            (given.out / f"{transport}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{time.monotonic() - began:.0f} s")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
