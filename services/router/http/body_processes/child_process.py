"""Child processes of the router, for work that would stall its event loop or crash it."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock
from typing import Any

from pagewire.services.router.http.body_processes.framing import send_message
from pagewire.shared.base.errors import RequestFailedError

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
MAX_PROCESS_BYTES = 512 << 20  # one that holds more ends: it would not give that back
SHUTS_DOWN = "the router shuts down"


class ChildPool:
    """Processes of one program, each used by one thread at a time.

    Args:
        program: the module that each process runs.
        settings: the first message to each process.
        count: of threads; there are at most as many processes.
        name: of the threads.

    Attributes:
        threads: the pool whose threads may use a process.
        processes: the processes that have not been ended.
        is_closed: all are ended.
    """

    def __init__(self, program: str, settings: dict[str, Any], count: int, name: str) -> None:
        self.threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        self.processes: set[ChildProcess] = set()
        self.is_closed = False
        self._program, self._settings = program, settings
        self._idle: list[ChildProcess] = []
        self._lock = Lock()

    def take(self, timeout_s: float) -> ChildProcess:
        """Return an idle process, or a new one with this timeout; `keep` or `end` it.

        Raises:
            RequestFailedError: the router shuts down.
            OSError: none can be started.
        """
        while (idle := self._pop_idle()) is not None:
            if idle.is_alive:
                return idle
            self.end(idle)
        with self._lock:
            if self.is_closed:
                raise RequestFailedError(SHUTS_DOWN)
            process = ChildProcess(self._program, self._settings, timeout_s)
            self.processes.add(process)
            return process

    def keep(self, process: ChildProcess, memory_bytes: int) -> None:
        """Return a process to the pool after its answer, or end it if it holds too much memory."""
        with self._lock:  # so that nothing is kept once `close` has ended what is idle
            is_kept = memory_bytes <= MAX_PROCESS_BYTES and not self.is_closed
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            self.end(process)

    def end(self, process: ChildProcess) -> None:
        """End a process; if that fails, the log says so."""
        with self._lock:
            self.processes.discard(process)
        try:
            process.close()
        except (OSError, subprocess.TimeoutExpired):
            logger.exception("cannot stop a process that parses request bodies")

    def close(self) -> None:
        """End all, busy ones included: their threads then end as well."""
        with self._lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
            for process in self.processes:
                process.kill()
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in idle:
            self.end(process)

    def _pop_idle(self) -> ChildProcess | None:
        with self._lock:
            return self._idle.pop() if self._idle else None


class ChildProcess:
    """One process, and the connection to it. One thread at a time uses it.

    Args:
        program: a module that serves the socket whose descriptor is its argument.
        settings: its first message.
        timeout_s: for each of its answers.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, program: str, settings: dict[str, Any], timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as stack:
            self.connection = stack.enter_context(ours)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the router
            )
            stack.pop_all()
        self.connection.settimeout(timeout_s)
        self._settings: dict[str, Any] | None = settings

    @property
    def is_new(self) -> bool:
        """Whether nothing has been sent to it."""
        return self._settings is not None

    @property
    def pid(self) -> int:
        """The operating system's number of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    def send(self, message: object) -> None:
        """Send a message, after the settings.

        Raises:
            OSError: the process has ended, or takes too long.
        """
        self.send_settings()
        send_message(self.connection, message)

    def send_settings(self) -> None:
        """Send the settings, if they have not been sent.

        Raises:
            OSError: the process has ended, or takes too long.
        """
        if self._settings is not None:
            send_message(self.connection, self._settings)
            self._settings = None

    def killed_by(self) -> int | None:
        """Wait for the end of a process that has closed its connection.

        Returns:
            The signal that has ended it; None if none has, or if it has not ended.
        """
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        return -code if code < 0 else None

    def kill(self) -> None:
        """End the process; a thread that waits for its answer then closes the rest."""
        self._process.kill()

    def close(self) -> None:
        """End the process and the connection."""
        self.connection.close()
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)
