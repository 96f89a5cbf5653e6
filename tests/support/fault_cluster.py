"""A cluster of two prefill and two decode workers in which cells are played."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from pagewire.tests.support.fault_board import FaultBoard, Order
from pagewire.tests.support.fault_cells import COUNTED, Cell, CellResult
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_body
from pagewire.tests.support.local_cluster import LocalCluster

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LINKS = 2  # of each worker
IN_FLIGHT = 8
MAX_PASSES = 8
BRIEF_S = 0.3
FIRE_TIMEOUT_S = GIVE_UP_TIMEOUT_S = REUSE_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 60.0
CELL_TIMEOUT_S = 150.0


class Clients:
    """Clients that send requests for completions and check the answers.

    Attributes:
        num_asked: number of requests.
        num_answered: number of correct answers.
    """

    def __init__(self, url: str, prompts: GreedyPrompts, numbers: itertools.count[int]) -> None:
        self._url, self._prompts, self._numbers = url, prompts, numbers
        self.num_asked = self.num_answered = 0

    @asynccontextmanager
    async def asking(self, at_least: int) -> AsyncIterator[None]:
        """Send at least this number of requests during the context; fails if one fails."""
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
        self._numbers, self._strikes = itertools.count(seed), Counter[str]()

    async def warm_up(self) -> None:
        """Ask for a few completions, for which the moves' kernels are compiled."""
        pids = self._pids()
        async with Clients(self._cluster.url, self._prompts, self._numbers).asking(IN_FLIGHT):
            pass
        await self._wait_settled(pids, set())

    async def play(self, cell: Cell, num_requests: int) -> CellResult:
        """Play one cell; the result has its errors."""
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
            for pid in before.values():  # also after an error, no process stays stopped
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
        """Have a worker carry out an order, then call `then`."""
        worker = f"{cell.role}-{self._strikes[cell.role] % 2}"
        self._strikes[cell.role] += 1
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
        """Do nothing: the supervisor restarts the worker."""
        return 0

    async def _stop_briefly(self, fired: dict[str, Any]) -> int:
        await asyncio.sleep(BRIEF_S)
        os.kill(fired["target"], signal.SIGCONT)
        return 0

    async def _stop_for_long(self, fired: dict[str, Any]) -> int:
        """Continue a stopped process after its peer has closed the link.

        A sender with a staging slot continues after another sender has filled that slot.
        """
        target = fired["target"]
        is_sender, has_slot = target == fired["sender"], fired["credit"] >= 0
        peer = fired["receiver"] if is_sender else fired["sender"]
        await self._event(GIVE_UP_TIMEOUT_S, "closed", after=fired, by=peer, peer=target)
        if is_sender and has_slot:  # the receiver continues it
            await self._event(REUSE_TIMEOUT_S, "reused", after=fired)
        else:
            os.kill(target, signal.SIGCONT)
        return int(is_sender and has_slot)

    async def _event(
        self, timeout_s: float, event: str, *, after: dict[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Wait for an event with these fields, and return it."""
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
        """Return what is not settled yet; None if everything is."""
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
    """Return an exception's type and text; for a group, those of its first one."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return f"{type(exc).__name__}: {exc}"
