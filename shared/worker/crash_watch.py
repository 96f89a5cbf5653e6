"""A worker's side of its crash reporter: starts it, and records the step under way for it.

A record costs the engine's thread microseconds, and most steps none: the rows of a step without
chunks are mostly those of the step before.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable

import msgspec

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.logs import dump_crashes_to_stderr
from pagewire.shared.engine.scheduling.decode_batch import DecodeRows
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.step_clock import RunningStep, StepClock
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.crash_reporter import (
    LENGTH_BYTES,
    MEMORY_BYTES,
    PROGRAM,
    Setup,
    StepSummary,
)

logger = logging.getLogger(__name__)

STOP_S = 5.0  # for the reporter to see the socket's end; then it is killed
MAX_NAMES = 1024  # of about 32 bytes each
MAX_LOG_NAMES = 16
_NO_STEP = bytes(LENGTH_BYTES)


class CrashWatch:
    """Until it is disarmed, another process reports if this one crashes in native code.

    If that process ends first, crashes are written to stderr as without it. Make it in the event
    loop, which notices that.

    Attributes:
        reporter: that process.

    Args:
        settings: the worker's settings.
        epoch: number of this run of the worker.
        steps: has the step that runs.
        names_of: returns what peers call the requests of a sequence; called in the engine's thread.

    Raises:
        ConfigError: this machine cannot start the process.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        epoch: int,
        steps: StepClock,
        names_of: Callable[[Sequence], Iterable[str]],
    ) -> None:
        self._names_of = names_of
        self._recorded: DecodeRows | None = None
        self._length = _NO_STEP
        setup = Setup(
            worker_id=settings.worker_id,
            epoch=epoch,
            redis_url=settings.redis_url,
            cluster_secret=settings.cluster_secret.get_secret_value(),
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        try:
            self.reporter, self._socket, self._memory = _start_reporter(setup)
        except OSError as exc:
            raise ConfigError(f"the crash reporter cannot be started: {exc}") from exc
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        # Disabled first: libraries that were loaded meanwhile may have set their own handlers.
        faulthandler.disable()
        faulthandler.enable(self._socket)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._on_reporter_lost)
        steps.on_change = self._record_step

    def _record_step(self, step: RunningStep | None) -> None:
        """Record which step runs; None if none does. Called in the engine's thread."""
        if step is None:
            self._memory[:LENGTH_BYTES] = _NO_STEP
            return
        rows, has_chunks = step.schedule.rows, bool(step.schedule.chunks)
        if has_chunks or rows is not self._recorded:
            self._write_summary(step)
            self._recorded = None if has_chunks else rows
        self._memory[:LENGTH_BYTES] = self._length

    def _write_summary(self, step: RunningStep) -> None:
        suspects = step.crash_suspects
        names = [name for sequence in suspects for name in self._names_of(sequence)]
        log_names = [sequence.log_name for sequence in suspects[:MAX_LOG_NAMES]]
        summary = StepSummary(step.work.text, names[:MAX_NAMES], log_names)
        encoded = msgspec.msgpack.encode(summary)
        if len(encoded) > MEMORY_BYTES - LENGTH_BYTES:
            encoded = msgspec.msgpack.encode(StepSummary(step.work.text, [], []))
        length = len(encoded)
        self._memory[:LENGTH_BYTES] = _NO_STEP  # a crash in another thread finds no half summary
        self._memory[LENGTH_BYTES : LENGTH_BYTES + length] = encoded
        self._length = length.to_bytes(LENGTH_BYTES, "little")

    def disarm(self) -> None:
        """Report no crash from now on: the worker ends, and gives the reason itself. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            faulthandler.disable()
            dump_crashes_to_stderr()
            self._socket.close()

    def _on_reporter_lost(self) -> None:
        """Have crashes written to stderr: nobody is left to read the socket."""
        self.disarm()
        logger.error(
            "the crash reporter has ended: until this worker is started again, nothing counts "
            "against a request that crashes it"
        )

    async def close(self) -> None:
        """Disarm, and wait until the reporter has ended. The engine has ended before."""
        self.disarm()
        self._memory.close()
        try:
            await asyncio.to_thread(self.reporter.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self.reporter.kill()
            await asyncio.to_thread(self.reporter.wait, STOP_S)


def _start_reporter(setup: Setup) -> tuple[subprocess.Popen[bytes], socket.socket, mmap.mmap]:
    """Start a reporter; returns it, this process's end of the socket, and the shared memory.

    The memory is not a file on a disk: if that were full, a write would end the process.

    Raises:
        OSError: there are too few processes, descriptors or bytes.
    """
    ours, theirs = socket.socketpair()
    with (
        contextlib.ExitStack() as stack,
        theirs,
        os.fdopen(os.memfd_create("pagewire-step"), "wb") as file,
    ):
        stack.callback(ours.close)
        ours.sendall(msgspec.json.encode(setup) + b"\n")
        file.truncate(MEMORY_BYTES)
        memory = mmap.mmap(file.fileno(), MEMORY_BYTES)
        stack.callback(memory.close)
        fds = theirs.fileno(), file.fileno()
        reporter = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # a terminal's Ctrl-C must not end it first
        )
        stack.pop_all()  # the caller closes them
    return reporter, ours, memory
