"""A prefill worker over a fake device in a process of its own, which can be killed and stopped."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, cast

from pagewire.shared.cluster.registry import WorkerRecord
from pagewire.tests.support.kv_services import prefill_worker
from pagewire.tests.support.kv_workers import Times
from pagewire.tests.support.worker_records import record

_START_S = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])  # so that only the first process takes seconds


class PrefillProcess:
    """Handle of a prefill worker's process."""

    def __init__(self, worker_id: str, epoch: int, pid: int, commands: Connection) -> None:
        self.worker_id, self.epoch = worker_id, epoch
        self._pid, self._commands = pid, commands
        assert commands.poll(_START_S)
        self._endpoint = commands.recv()

    def record(self) -> WorkerRecord:
        """Return the worker's record."""
        return record(self.worker_id, self.epoch, role="prefill", endpoint=self._endpoint)

    def hold(self, **flags: bool) -> None:
        """Set flags of the fake device: `has_run`, `has_moved`."""
        self._commands.send(flags)
        assert self._commands.poll(_START_S)
        self._commands.recv()

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        os.kill(self._pid, number)


@contextmanager
def prefill_process(worker_id: str = "prefill-0", epoch: int = 1) -> Iterator[PrefillProcess]:
    """Run a prefill worker; kill its process at the end."""
    commands, theirs = _context.Pipe()
    process = _context.Process(target=_main, args=(worker_id, epoch, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield PrefillProcess(worker_id, epoch, cast(int, process.pid), commands)
    finally:
        process.kill()
        process.join(10)
        process.close()
        commands.close()


def _main(worker_id: str, epoch: int, commands: Connection) -> None:
    asyncio.run(_serve(worker_id, epoch, commands))


async def _serve(worker_id: str, epoch: int, commands: Connection) -> None:
    async with prefill_worker(worker_id, epoch, times=Times(lease_s=1.0)) as worker:
        commands.send(worker.endpoint)
        while True:
            flags: dict[str, Any] = await asyncio.to_thread(commands.recv)
            for name, value in flags.items():
                setattr(worker.device, name, value)
            commands.send(None)
