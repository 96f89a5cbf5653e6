"""A worker's side of its crash reporter: starts it, and has crashes written to its socket."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import socket
import subprocess
import sys

import msgspec

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.logs import dump_crashes_to_stderr
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.crash_reporter import PROGRAM, Setup
from pagewire.shared.worker.step_record import StepRecord

logger = logging.getLogger(__name__)

STOP_S = 5.0  # for the reporter to see the socket's end; then it is killed


class CrashWatch:
    """Until it is disarmed, another process reports if this one crashes in native code.

    If that process ends first, crashes are written to stderr as without it. Make it in the event
    loop, which notices that.

    Attributes:
        reporter: that process.

    Args:
        settings: the worker's settings.
        epoch: number of this run of the worker.
        record: has the step that runs.

    Raises:
        ConfigError: this machine cannot start the process.
    """

    def __init__(self, settings: WorkerSettings, epoch: int, record: StepRecord) -> None:
        setup = Setup(
            worker_id=settings.worker_id,
            epoch=epoch,
            redis_url=settings.redis_url,
            cluster_secret=settings.cluster_secret.get_secret_value(),
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        try:
            self.reporter, self._socket = _start_reporter(setup, record.fd)
        except OSError as exc:
            raise ConfigError(f"the crash reporter cannot be started: {exc}") from exc
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        # Disabled first: libraries that were loaded meanwhile may have set their own handlers.
        faulthandler.disable()
        faulthandler.enable(self._socket)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._on_reporter_lost)

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
        """Disarm, and wait until the reporter has ended."""
        self.disarm()
        try:
            await asyncio.to_thread(self.reporter.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self.reporter.kill()
            await asyncio.to_thread(self.reporter.wait, STOP_S)


def _start_reporter(setup: Setup, record_fd: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a reporter; returns it, and this process's end of the socket.

    Raises:
        OSError: there are too few processes or descriptors.
    """
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack, theirs:
        stack.callback(ours.close)
        ours.sendall(msgspec.json.encode(setup) + b"\n")
        fds = theirs.fileno(), record_fd
        reporter = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,  # a terminal's Ctrl-C must not end it first
        )
        stack.pop_all()  # the caller closes it
    return reporter, ours
