"""Starts one child process, captures its output and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from pagewire.services.cli.up import tether
from pagewire.services.cli.up.log_lines import OF_REQUESTS

TAIL_LINES = 400  # a crash writes the stacks of all threads
MAX_LINE_BYTES = 64 << 10  # such as a JSON line with a traceback
MAX_LOG_BYTES = 16 << 20
CHUNK_BYTES = 64 << 10
# After a child's exit its pipe closes at once, unless something it started still holds it.
DRAIN_S = 1.0


@dataclass(frozen=True)
class ChildSpec:
    """The command line, environment and name of a child process.

    Attributes:
        name: the child's name in messages, and its log file's, e.g. "prefill-0".
        argv: program and arguments.
        env: variables on top of the supervisor's own.
        is_store: the others depend on it, so it starts first and stops last.
        is_front: all requests come through it, so it is never left down for long and stops first.
        fds: file descriptors of this process that it inherits, under the same numbers.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    is_store: bool = False
    is_front: bool = False
    fds: tuple[int, ...] = ()

    @property
    def stop_phase(self) -> int:
        """The phase in which it stops: routers first, so that requests end; the store last."""
        return 0 if self.is_front else 2 if self.is_store else 1


@dataclass(frozen=True)
class ExitStatus:
    """How a child ended; a negative code is the signal that killed it."""

    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        if self.code == -signal.SIGKILL:
            return "killed by SIGKILL, which is what the system does when memory runs out"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


class OutputLog:
    """A child's output: whole in a file of bounded size, the last lines in memory.

    Lines about requests that have ended are not kept in memory: they do not explain a child's end.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None] | None = None) -> None:
        self.path = path
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self._file: FileIO | None = path.open("ab", buffering=0)

    @property
    def last_line(self) -> str:
        """The last full line, empty before there is one."""
        return self._lines[-1] if self._lines else ""

    def tail(self, count: int) -> list[str]:
        """Return the last full lines, oldest first."""
        return list(self._lines)[-count:]

    def clear_tail(self) -> None:
        """Forget the lines in memory: a restarted child starts with none."""
        self._lines.clear()

    def feed(self, chunk: bytes) -> None:
        """Add bytes that the child wrote to the file and to the last lines."""
        try:
            self._write(chunk)
        except OSError as exc:  # a full disk must not stop the child, whose pipe would fill
            self._close_file()
            self._add(f"pagewire: {self.path} is no longer written: {exc.strerror}".encode())
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            self._add(line)
        if len(self._partial) > MAX_LINE_BYTES:
            self.end_line()

    def end_line(self) -> None:
        """Treat output without a newline at the end as a line."""
        if self._partial:
            self._add(self._partial)
            self._partial = b""

    def close(self) -> None:
        """Close the file; the tail stays readable."""
        self.end_line()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, chunk: bytes) -> None:
        if self._file is None:
            return
        if self._file.tell() + len(chunk) > MAX_LOG_BYTES:
            self._file.close()
            self.path.replace(self.path.with_suffix(".log.1"))
            self._file = self.path.open("ab", buffering=0)
        self._file.write(chunk)

    def _add(self, raw: bytes) -> None:
        line = raw[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if not line:
            return
        if OF_REQUESTS not in line:  # there may be hundreds in a second
            self._lines.append(line)
        if self._on_line is not None:
            self._on_line(line)


class Child:
    """A running process in its own session, so that a terminal's Ctrl-C does not reach it.

    Attributes:
        ended: done when the process has ended, all that it wrote is in the log and nothing that
            it started is left.
    """

    def __init__(
        self,
        spec: ChildSpec,
        process: asyncio.subprocess.Process,
        output: asyncio.Task[None],
    ) -> None:
        self.spec = spec
        self.pid = process.pid
        self.ended = asyncio.create_task(self._end(process, output), name=f"end of {spec.name}")

    @classmethod
    async def spawn(cls, spec: ChildSpec, log: OutputLog) -> Child:
        """Start the program, tied to this process, with its output going to the log."""
        # A pipe of our own: asyncio's would keep `wait` waiting for whoever inherited it.
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *spec.argv),
                env={**os.environ, **spec.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=spec.fds,
                start_new_session=True,
            )
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        output = asyncio.create_task(_copy_output(read_end, log), name=f"output of {spec.name}")
        return cls(spec, process, output)

    def terminate(self) -> None:
        """Send SIGTERM to its process group."""
        self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, now."""
        self._signal_group(signal.SIGKILL)

    async def _end(
        self, process: asyncio.subprocess.Process, output: asyncio.Task[None]
    ) -> ExitStatus:
        code = await process.wait()
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await output
        return ExitStatus(code)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


async def _copy_output(read_end: int, log: OutputLog) -> None:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(read_end, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            log.feed(chunk)
        log.end_line()
    finally:
        transport.close()
