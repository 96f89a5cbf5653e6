"""Kills and freezes workers and corrupts KV at planned moments of the disturbed run.

A byte of the first answer's KV is flipped on its way; the other answers begin afterwards. The
decode worker that generates the first answer is frozen until its answers have moved to the other
one. As soon as it can take requests again, the other one is killed. Then the answers move back, and
the first prefill worker that sends KV for that dies in the middle of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pagewire.services.cli.prove.answers import MAX_TOKENS, Reader
from pagewire.services.cli.prove.cluster import ProofCluster, wait_until
from pagewire.services.cli.prove.judgement import Facts, Strike
from pagewire.services.cli.prove.orders import Orders
from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.settings.config import RouterSettings, load_settings

STAGE_TIMEOUT_S = 15.0  # for what a fault is to lead to
FREEZE_AT = 30  # tokens of the first answer
KILL_AT = 70  # tokens of the first answer, at the earliest
# A worker that was frozen shows its old KV links as whole until it has noticed that they are closed
# and has published this with a heartbeat.
SETTLE_HEARTBEATS = 2.5
# A held worker is killed then at the latest: its lease is longer, so that nobody takes it for dead.
HELD_HEARTBEATS = 4.0
# The worker that is to be killed is stopped here, if the frozen one is not back yet: on a quick
# machine the answers would end before that.
HOLD_AT = MAX_TOKENS - 32
MOVED = "pagewire_request_migrations_total"
SEGMENTS = "pagewire_kv_transfer_segments_total"
RESENDS = "pagewire_kv_transfer_resends_total"
BLOCKS = "pagewire_kv_blocks"


@dataclass
class Disturber:
    """Brings the faults about during one run, and notes what happened.

    Attributes:
        reader: streams the run's answers.
        say: shows a fault as soon as it has happened.
        facts: what has happened so far.
    """

    cluster: ProofCluster
    reader: Reader
    orders: Orders
    say: Callable[[str], None]
    facts: Facts
    _pids: dict[str, int | None] = field(default_factory=dict)  # when the run begins
    _heartbeat_s: float = field(
        default_factory=lambda: load_settings(RouterSettings, {}).heartbeat_s
    )

    async def run(self) -> None:
        """Stream all answers, and disturb them; return when all have ended."""
        names = self.cluster.context.options.worker_names
        self._pids = {name: self.cluster.pid(name) for name in names}
        self.orders.post("flip")
        async with asyncio.TaskGroup() as group:
            group.create_task(self.reader.read(0))
            await self._wait_for_tokens(2)  # its KV is there, although it was corrupt at first
            self.facts.flip = self.orders.claim_of("flip")
            for index in range(1, len(self.reader.answers)):
                group.create_task(self.reader.read(index))
            if self.facts.flip is not None:
                self.say(f"flipped a byte of KV from {self.facts.flip.worker}")
                await self._strike_both(self.facts.flip.receiver)
        await self._settle()

    async def _strike_both(self, first: str) -> None:
        """Freeze the decode worker that generates the first answer, then kill the other one."""
        workers = self.cluster.context.options.worker_names
        other = next(name for name in workers if name.startswith("decode") and name != first)
        await self._wait_for_tokens(FREEZE_AT)
        holding, settling = start_task(self._hold(other), "hold"), None
        try:
            await self._freeze(first)
            settling = start_task(self._settle_after_freeze(first), "settling")
            await asyncio.wait({settling, holding}, return_when=asyncio.FIRST_COMPLETED)
            await self._kill(other)
        finally:
            await end_task(settling)
            await end_task(holding)
            self._signal(other, signal.SIGCONT)  # if it was not killed

    async def _wait_for_tokens(self, count: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STAGE_TIMEOUT_S):
                await self.reader.until(count)

    async def _hold(self, worker: str) -> None:
        """Stop a worker before the first answer ends; return before its lease does."""
        await self.reader.until(HOLD_AT)
        if not self.reader.has_ended:
            self._signal(worker, signal.SIGSTOP)
            await asyncio.sleep(HELD_HEARTBEATS * self._heartbeat_s)

    async def _settle_after_freeze(self, worker: str) -> None:
        """Wait until a worker that was frozen can take over the other one's answers."""
        await self._wait_for_tokens(KILL_AT)
        await wait_until(lambda: self._can_go_on(worker), STAGE_TIMEOUT_S)
        await asyncio.sleep(SETTLE_HEARTBEATS * self._heartbeat_s)
        await wait_until(lambda: self._can_go_on(worker), STAGE_TIMEOUT_S)

    async def _can_go_on(self, worker: str) -> bool:
        return self.reader.has_ended or await self.cluster.is_ready(worker)

    async def _freeze(self, worker: str) -> None:
        """Stop a worker until its answers have moved."""
        if (strike := self._strike(worker, signal.SIGSTOP)) is None:
            return
        self.facts.frozen = strike
        self.say(f"froze {worker} (SIGSTOP)")
        try:
            prefills = await self.cluster.counters("prefill")  # before one is killed
            self.facts.resent = prefills.total(RESENDS)
            await wait_until(self._has_moved, STAGE_TIMEOUT_S)
        finally:
            self._signal(worker, signal.SIGCONT)

    async def _has_moved(self) -> bool:
        routers = await self.cluster.counters("router")
        return self.reader.has_ended or routers.total(MOVED) > 0

    async def _kill(self, worker: str) -> None:
        """Kill a decode worker, and a prefill worker that sends KV to the worker that goes on."""
        self.orders.post("kill")
        if (strike := self._strike(worker, signal.SIGKILL)) is None:
            return
        self.facts.killed_decode = strike
        self.say(f"killed {worker} (SIGKILL)")
        await wait_until(self._has_killed_prefill, STAGE_TIMEOUT_S)
        if (claim := self.facts.killed_prefill) is not None:
            self.say(f"killed {claim.worker} (SIGKILL), which was sending KV")

    async def _has_killed_prefill(self) -> bool:
        self.facts.killed_prefill = self.orders.claim_of("kill")
        return self.facts.killed_prefill is not None or self.reader.has_ended

    def _strike(self, worker: str, number: signal.Signals) -> Strike | None:
        """Send a worker a signal while the first answer is being generated."""
        tokens = len(self.reader.answers[0].token_ids)
        if self.reader.has_ended or not self._signal(worker, number):
            return None
        return Strike(worker, tokens)

    def _signal(self, worker: str, number: signal.Signals) -> bool:
        if (pid := self.cluster.pid(worker)) is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has just died
            return False
        return True

    async def _settle(self) -> None:
        """Read what is left once all answers have ended."""
        facts = self.facts
        killed = {claim.worker for claim in (facts.killed_decode, facts.killed_prefill) if claim}
        facts.survivors = tuple(name for name in self._pids if name not in killed)
        await wait_until(self._is_clean, STAGE_TIMEOUT_S)

    async def _is_clean(self) -> bool:
        counters, facts, pids = await self.cluster.counters(), self.facts, self._pids
        facts.died = tuple(name for name in pids if self.cluster.pid(name) != pids[name])
        facts.moved = counters.total(MOVED)
        facts.corrupt = counters.total(SEGMENTS, direction="received", outcome="corrupt")
        used = counters.by_process(BLOCKS, state="used")
        facts.blocks_left = {name: int(used[name]) for name in facts.survivors if name in used}
        are_known = len(facts.blocks_left) == len(facts.survivors)
        # The supervisor may need a second to see that a process has died.
        are_dead = {*facts.died, *facts.survivors} >= pids.keys()
        return are_known and are_dead and not any(facts.blocks_left.values())
