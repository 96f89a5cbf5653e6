"""The step under way, in memory that a worker shares with its crash reporter.

A record costs the engine's thread microseconds, and most steps none: the rows of a step without
chunks are mostly those of the step before.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable

import msgspec

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.engine.scheduling.decode_batch import DecodeRows
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.step_clock import RunningStep
from pagewire.shared.worker.crash_reporter import LENGTH_BYTES, MEMORY_BYTES, StepSummary

MAX_NAMES = 1024  # of about 32 bytes each
MAX_LOG_NAMES = 16
_NO_STEP = bytes(LENGTH_BYTES)


class StepRecord:
    """Says which step runs, also after this process has crashed in it.

    The memory is not a file on a disk: if that were full, a write would end the process.

    Attributes:
        fd: file descriptor of the memory.

    Args:
        names_of: returns what peers call the requests of a sequence; called in the engine's thread.

    Raises:
        ConfigError: this machine has too few descriptors or bytes.
    """

    def __init__(self, names_of: Callable[[Sequence], Iterable[str]]) -> None:
        self._names_of = names_of
        self._recorded: DecodeRows | None = None
        self._length = _NO_STEP
        try:
            with contextlib.ExitStack() as stack:
                self.fd = os.memfd_create("pagewire-step")
                stack.callback(os.close, self.fd)
                os.truncate(self.fd, MEMORY_BYTES)
                self._memory = mmap.mmap(self.fd, MEMORY_BYTES)
                stack.pop_all()  # `close` closes it
        except OSError as exc:
            raise ConfigError(f"no memory to share with the crash reporter: {exc}") from exc

    def write(self, step: RunningStep | None) -> None:
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

    def close(self) -> None:
        """Free the memory. The engine has ended before."""
        self._memory.close()
        os.close(self.fd)
