"""Writes log lines in a separate thread, so that no service waits for a stuck reader of stderr."""

from __future__ import annotations

import logging
import os
import queue
import select
import threading

MAX_LINES = 10_000
FLUSH_S = 2.0


class LogWriter(logging.Handler):
    """A handler that never waits for its file. While its queue is full, further lines are lost.

    Before the next line that is not lost, it writes how many were lost.

    Args:
        fd: file descriptor of the file. Python's buffer is not used, because a stuck write would
            hold its lock until the interpreter ends, which then aborts.
        max_lines: most lines that wait for the file.
    """

    def __init__(self, fd: int, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._fd = fd
        self._waiting: queue.Queue[str | threading.Event] = queue.Queue(max_lines)
        self._num_lost = 0
        threading.Thread(target=self._write_all, name="log-writer", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line. The lock of the handler is held."""
        try:
            lines = [self.format(self._loss())] if self._num_lost else []
            text = "".join(f"{line}\n" for line in [*lines, self.format(record)])
        except Exception:  # noqa: BLE001 - as of any handler: logging shows where the call is wrong
            self.handleError(record)
            return
        try:
            self._waiting.put_nowait(text)
            self._num_lost = 0
        except queue.Full:
            self._num_lost += 1

    def flush(self) -> None:
        """Wait until all lines are written, for twice `FLUSH_S` at most."""
        written = threading.Event()
        try:
            self._waiting.put(written, timeout=FLUSH_S)
        except queue.Full:
            return
        written.wait(FLUSH_S)

    def _loss(self) -> logging.LogRecord:
        message = f"{self._num_lost} log lines were lost: nobody read those before them in time"
        return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)

    def _write_all(self) -> None:
        while True:
            text = self._waiting.get()
            if isinstance(text, threading.Event):
                text.set()
                continue
            try:
                self._write(text.encode(errors="backslashreplace"))
            except OSError:  # the reader is gone
                continue

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process has made the file non-blocking
                select.select([], [self._fd], [])
