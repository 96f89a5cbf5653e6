"""How long a worker serves, and how its running work ends.

If a step takes far longer than predicted, the worker's record says "draining", and later the
process ends without waiting for running work, so that it is started again. A worker that has lost
too many UCX links drains and ends, and is started again, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from pagewire.shared.transfer.transports.base import Transport
from pagewire.shared.worker.engine_watch import EngineWatch
from pagewire.shared.worker.service_gate import ServiceGate

logger = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
DRAIN_REPORT_S = 5.0


@dataclass(slots=True)
class WorkerLifetime:
    """Watches what ends a worker, and lets its work end.

    Attributes:
        watch: notices that the engine hangs or has ended.
        transports: those that are open in this process.
        gate: knows the running work.
        is_draining: no new requests are taken.
    """

    watch: EngineWatch
    transports: Collection[Transport]
    gate: ServiceGate
    is_draining: bool = False

    def check_health(self) -> bool:
        """Poll the engine's heartbeat; return whether its loop runs and new work is taken."""
        self.watch.poll()
        return not self.is_draining and self.watch.is_well

    @property
    def is_lost(self) -> bool:
        """Whether the engine hangs or has ended, as of the last poll."""
        return self.watch.hangs or self.watch.has_ended

    @property
    def is_worn_out(self) -> bool:
        """Whether only a new process can open further KV links; this one drains and ends."""
        return any(transport.should_restart for transport in self.transports)

    async def serve(self, stop: asyncio.Event) -> int:
        """Wait for a signal to stop, or for what makes a restart necessary; return the exit code.

        Others poll the engine, too, but only this does so as often as `EngineWatch` requires.
        """
        while not stop.is_set():
            self.watch.poll()
            if self.is_lost:
                return 1
            if self.is_worn_out:
                logger.error(
                    "restarting: too many UCX workers of this process broke during a transfer"
                )
                return 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.watch.interval_s):
                    await stop.wait()
        return 0

    async def drain(self, timeout_s: float) -> None:
        """Let running work finish, for this long at most; not if the engine hangs."""
        report_at = time.monotonic()
        deadline = report_at + timeout_s
        while (count := self._poll_live_work()) and (now := time.monotonic()) < deadline:
            if now >= report_at:
                logger.info("draining: requests running: %d, %.0f s left", count, deadline - now)
                report_at = now + DRAIN_REPORT_S
            await asyncio.sleep(DRAIN_POLL_S)
        if count:
            logger.warning("the drain time is over: %d requests go on elsewhere", count)

    def _poll_live_work(self) -> int:
        self.watch.poll()
        return 0 if self.is_lost else self.gate.num_active
