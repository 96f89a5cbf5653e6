"""A worker's side of its crash reporter: starts it, and notes the step under way for it.

Notes cost the engine's thread microseconds, and most steps none: the rows of a step without chunks
are mostly those of the step before.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable

import msgspec

from pagewire.shared.config import WorkerSettings
from pagewire.shared.engine.scheduling.decode_batch import DecodeRows
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.step_clock import RunningStep
from pagewire.shared.logs import dump_crashes_to_stderr
from pagewire.shared.worker.crash_reporter import (
    LENGTH_BYTES,
    MEMORY_BYTES,
    PROGRAM,
    Setup,
    StepNote,
)

logger = logging.getLogger(__name__)

STOP_S = 5.0
_MAX_NAMES = 1024
_NONE = bytes(LENGTH_BYTES)


class CrashWatch:
    """Until it is disarmed, another process reports if this one crashes in native code.

    If that process ends first, crashes are written to stderr as without it. Make it in the event
    loop, which notices that.

    Attributes:
        reporter: that process.

    Args:
        settings: of this worker.
        epoch: number of this run of the worker.
        names_of: returns what peers call the requests of a sequence; called in the engine's thread.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, settings: WorkerSettings, epoch: int, names_of: Callable[[Sequence], Iterable[str]]
    ) -> None:
        self._names_of = names_of
        self._noted: DecodeRows | None = None
        self._length = _NONE
        with os.fdopen(_open_memory(), "wb") as file:
            file.truncate(MEMORY_BYTES)
            self._memory = mmap.mmap(file.fileno(), MEMORY_BYTES)
            self._socket, theirs = socket.socketpair()
            with theirs:
                fds = theirs.fileno(), file.fileno()
                self.reporter = subprocess.Popen(
                    [sys.executable, "-P", "-m", PROGRAM, *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=fds,
                    start_new_session=True,  # a terminal's Ctrl-C must not end it first
                )
        setup = Setup(
            worker_id=settings.worker_id,
            epoch=epoch,
            redis_url=settings.redis_url,
            cluster_secret=settings.cluster_secret.get_secret_value(),
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        self._socket.sendall(msgspec.json.encode(setup) + b"\n")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        # Disabled first: libraries that were loaded meanwhile may have set their own handlers.
        faulthandler.disable()
        faulthandler.enable(self._socket)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._on_reporter_lost)

    def note_step(self, step: RunningStep | None) -> None:
        """Note which step runs; None if none does. Called in the engine's thread."""
        if step is None:
            self._memory[:LENGTH_BYTES] = _NONE
            return
        rows, has_chunks = step.schedule.rows, bool(step.schedule.chunks)
        if has_chunks or rows is not self._noted:
            names = [name for each in step.suspects for name in self._names_of(each)]
            note = msgspec.msgpack.encode(StepNote(step.work.text, names[:_MAX_NAMES]))
            length, self._noted = len(note), None if has_chunks else rows
            self._memory[:LENGTH_BYTES] = _NONE  # a crash in another thread finds no half note
            self._memory[LENGTH_BYTES : LENGTH_BYTES + length] = note
            self._length = length.to_bytes(LENGTH_BYTES, "little")
        self._memory[:LENGTH_BYTES] = self._length

    def disarm(self) -> None:
        """Report nothing from now on: this worker ends, and says itself why. Idempotent."""
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
        """Disarm, and wait until the reporter has ended."""
        self.disarm()
        try:
            await asyncio.to_thread(self.reporter.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self.reporter.kill()
            await asyncio.to_thread(self.reporter.wait, STOP_S)


def _open_memory() -> int:
    """Return the descriptor of a file in memory.

    On a disk that is full, a write to mapped memory would end the process; and there may be no
    directory that can be written to. Outside Linux, only the disk has such files.
    """
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    return os.memfd_create("pagewire-step")
