"""A process of the router's own, for work that would stall its event loop, or end it."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from pagewire.services.router.http.bodies.protocol import send_message

END_TIMEOUT_S = 5.0


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
    def is_alive(self) -> bool:
        """Whether the process runs."""
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
