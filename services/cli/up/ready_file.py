"""Writes a file that shows other programs that a cluster is ready, and its URL."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pagewire.shared.base.errors import ConfigError

MARKS = {"pagewire", "pid", "url"}  # fields by which a ready file is recognised
MAX_BYTES = 1 << 20


class ReadyFile:
    """A file that is written in one step when a cluster is ready, and removed when it stops.

    The cluster holds a lock on its file until the process ends, in whatever way. A file that an
    earlier cluster has left is removed at once; any other file is refused.

    Raises:
        ConfigError: the path cannot be used, or a running cluster's file is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._refuse_held()
            if path.exists() and not _is_left_over(path):
                raise ConfigError(
                    f"--ready-file {path} exists and is not a ready file: remove it, or name "
                    "another path"
                )
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
                path.unlink(missing_ok=True)
        except OSError as exc:
            raise self._unusable(exc) from exc

    @contextlib.contextmanager
    def present(self, content: dict[str, Any]) -> Iterator[None]:
        """Let the file have this content until the context ends.

        Raises:
            ConfigError: it can no longer be written, or another cluster's is there by now.
        """
        text = f"{json.dumps(content, indent=2)}\n"
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with contextlib.ExitStack() as held:
            try:
                self._refuse_held()
                file = held.enter_context(part.open("w", encoding="utf-8"))
                fcntl.flock(file, fcntl.LOCK_SH)
                file.write(text)
                file.flush()
                part.replace(self.path)  # never half written
            except OSError as exc:
                part.unlink(missing_ok=True)
                raise self._unusable(exc) from exc
            try:
                yield
            finally:
                with contextlib.suppress(OSError, ValueError):  # gone, or by now another's
                    if self.path.read_text(encoding="utf-8") == text:
                        self.path.unlink()

    def _refuse_held(self) -> None:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            if is_held(file):
                raise ConfigError(
                    f"--ready-file {self.path} is a running cluster's: stop that one, or name "
                    "another path"
                )

    def _unusable(self, exc: OSError) -> ConfigError:
        return ConfigError(f"--ready-file {self.path} cannot be written: {exc.strerror}")


def is_held(file: BinaryIO) -> bool:
    """Return whether another process has locked a file.

    If none has, this process has locked it until it closes the file.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_left_over(path: Path) -> bool:
    """Return whether an earlier cluster has written a file, or it is empty as `mktemp` makes it."""
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return False
    raw = path.read_bytes()
    try:
        content = json.loads(raw) if raw.strip() else dict.fromkeys(MARKS)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() >= MARKS
