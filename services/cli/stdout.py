"""Ends the command line properly if stdout cannot be written."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from pagewire.services.cli.error_exit import EXIT_FAILURE


class _Descriptor(io.FileIO):
    """A file that records its last write error, even if the caller handles the exception."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            self.error = exc
            raise


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """Turn a stdout that is full or closed into a line on stderr and exit code 1.

    A pipe whose reader has ended is not an error: nothing is printed, and a command that continues
    keeps its own exit code.
    """
    before, file = sys.stdout, _open()
    sys.stdout = stream = _stream(file, before)
    try:
        try:
            yield
        finally:
            if file.error is None:
                stream.flush()
            elif not isinstance(file.error, BrokenPipeError):
                raise file.error
    except OSError:
        if file.error is None:
            raise
        if not isinstance(file.error, BrokenPipeError):
            print(f"pagewire: cannot write: {file.error.strerror}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_FAILURE) from None
    finally:
        if file.error is not None:
            _make_sink(file.fileno())  # flushing the rest of the buffer would fail again
        sys.stdout = before


def _open() -> _Descriptor:
    """Return stdout without a buffer; if it was closed, a file that refuses all writes.

    That file also prevents that a socket gets stdout's descriptor number.
    """
    closed = sys.stdout is None
    number = os.open(os.devnull, os.O_RDONLY) if closed else sys.stdout.fileno()
    return _Descriptor(number, "w", closefd=False)


def _stream(file: _Descriptor, like: Any) -> io.TextIOWrapper:
    if like is None:
        return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8")
    return io.TextIOWrapper(
        file if like.write_through else io.BufferedWriter(file),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def _make_sink(number: int) -> None:
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, number)
    os.close(sink)
