"""Lets a thread sleep until another one wakes it, or a file descriptor becomes readable."""

from __future__ import annotations

import os
import selectors
import threading

_DRAIN_BYTES = 4096


class Waker:
    """One thread waits, and any thread may wake it.

    The waiting thread calls `prepare`, checks whether it has anything to do, then calls `wait` and
    `finish`. A `wake` after `prepare` ends the wait; a `wake` before it does nothing.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._selector.register(self._read, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._sleeps = False
        self._is_woken = False
        self._is_closed = False

    def watch(self, fd: int) -> None:
        """Wake up when a file descriptor becomes readable."""
        self._selector.register(fd, selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        """Stop watching a file descriptor; call this before it is closed."""
        if not self._is_closed:
            self._selector.unregister(fd)

    def wake(self) -> None:
        """End the wait; from any thread."""
        with self._lock:
            if self._sleeps and not self._is_woken:
                self._is_woken = True
                os.write(self._write, b"\0")

    def prepare(self) -> None:
        """Begin a wait: from now on, `wake` ends it."""
        with self._lock:
            self._sleeps, self._is_woken = True, False

    def wait(self, timeout_s: float) -> None:
        """Sleep until `wake`, for this long at most."""
        self._selector.select(timeout_s)

    def finish(self) -> None:
        """End a wait: from now on, `wake` does nothing."""
        with self._lock:
            self._sleeps = False
            if self._is_woken:
                os.read(self._read, _DRAIN_BYTES)

    def close(self) -> None:
        """Free its resources; no thread may be waiting. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._selector.close()
            os.close(self._read)
            os.close(self._write)
