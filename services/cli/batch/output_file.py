"""Writes a batch's output file, which has whole lines even if a writing process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pagewire.services.cli.batch.lines import (
    ID_PREFIX,
    BatchLineError,
    OutputLine,
    lines_of,
    parse_output,
)
from pagewire.shared.base.errors import ConfigError, PagewireError

_START = b'{"id":"' + ID_PREFIX.encode()
COPY_BYTES = 1 << 20


class OutputFile:
    """A locked file of output lines; a context manager.

    Args:
        path: created if it is missing. An incomplete line of a killed process is removed.
        keep: called with each line of the file; lines for which it returns False are removed.

    Raises:
        ConfigError: the file cannot be written, another process writes to it, or it has other
            content.
    """

    def __init__(self, path: Path, keep: Callable[[OutputLine], bool]) -> None:
        self._path = Path(os.path.realpath(path))
        self._stack = contextlib.ExitStack()
        try:
            with self._stack:
                self._file = self._open(self._path)
                num_kept, total = self._check(keep)
                if num_kept < total:
                    self._replace(keep)
                self._stack = self._stack.pop_all()
        except BatchLineError as exc:
            raise ConfigError(f"{path}, {exc}; name another file") from exc
        except OSError as exc:
            raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def append(self, line: OutputLine) -> None:
        """Write a whole line or nothing. It is in the file even if this process is killed next.

        Raises:
            PagewireError: the line cannot be written.
        """
        data = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            end = self._file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                self._file.truncate(end)  # other requests may still append before all are cancelled
                raise
        except OSError as exc:
            raise PagewireError(f"{self._path} cannot be written: {exc.strerror}") from exc

    def _open(self, path: Path) -> io.FileIO:
        """Open a file and lock it until the context ends."""
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        file = self._stack.enter_context(io.FileIO(number, "a+"))
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ConfigError(f"{path} must be a file: a batch is resumed from its output")
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigError(f"another `pagewire batch` writes to {path}") from exc
        return file

    def _check(self, keep: Callable[[OutputLine], bool]) -> tuple[int, int]:
        """Read all lines and remove an incomplete one; return how many to keep, and the total."""
        num_kept = total = end = 0
        for line in _lines_from_start(self._file):
            if not line.endswith(b"\n"):
                if line[: len(_START)] != _START[: len(line)]:
                    raise BatchLineError(
                        f"line {total + 1}: this is not a line of a batch's output"
                    )
                self._file.truncate(end)
                break
            try:
                output = parse_output(line)
            except BatchLineError as exc:
                raise BatchLineError(f"line {total + 1}: {exc}") from exc
            num_kept, total, end = num_kept + keep(output), total + 1, end + len(line)
        return num_kept, total

    def _replace(self, keep: Callable[[OutputLine], bool]) -> None:
        """Replace this file atomically by one without the lines to remove."""
        new = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()  # left by a process that was killed here
        old, self._file = self._file, self._open(new)  # the old one stays locked, too
        os.fchmod(self._file.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
        with open(self._file.fileno(), "ab", COPY_BYTES, closefd=False) as buffered:
            for line in _lines_from_start(old):
                if keep(parse_output(line)):
                    buffered.write(line)
        new.replace(self._path)


def _lines_from_start(file: io.FileIO) -> Iterator[bytes]:
    file.seek(0)
    with open(file.fileno(), "rb", COPY_BYTES, closefd=False) as buffered:
        yield from lines_of(buffered)
