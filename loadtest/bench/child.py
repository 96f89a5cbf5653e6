"""Runs a function of a bench in a process that answers commands."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from pagewire.loadtest.cluster import BenchError

REPLY_TIMEOUT_S = 120.0
SPAWN = multiprocessing.get_context("spawn")


class BenchProcess:
    """A process of the bench that answers commands.

    Args:
        run: its function; the first argument is the other end of a connection.
        args: the other arguments.
    """

    def __init__(self, run: Callable[..., None], *args: Any) -> None:
        self._connection, there = SPAWN.Pipe()
        self._process = SPAWN.Process(target=run, args=(there, *args), daemon=True)
        self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        """The operating system's number of the process."""
        return self._process.pid or 0

    def ask(self, *command: Any) -> Any:
        """Send a command; return its result, see `result`."""
        self.send(*command)
        return self.result()

    def send(self, *command: Any) -> None:
        """Send a command: a tuple, whose form is the function's."""
        self._connection.send(command)

    def result(self) -> Any:
        """Wait for the result of the oldest command that has none yet.

        Raises:
            BenchError: the process reports an error, has ended, or does not answer.
        """
        if not self._connection.poll(REPLY_TIMEOUT_S):
            raise BenchError(f"the bench stands still: no answer within {REPLY_TIMEOUT_S:g} s")
        try:
            result = self._connection.recv()
        except (EOFError, OSError) as exc:
            raise BenchError("a process of the bench has ended, see above") from exc
        if isinstance(result, BenchError):
            raise result
        return result

    def has_result(self) -> bool:
        """Whether `result` would return at once."""
        return self._connection.poll()

    def close(self) -> None:
        """Close the pipe and end the process."""
        self._connection.close()
        self._process.join(5)
        self._process.kill()
