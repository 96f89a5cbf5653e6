"""A file that shows other programs that a cluster is ready, and where."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagewire.shared.errors import ConfigError

MARKS = {"pagewire", "pid", "url"}  # what each of these files has
MAX_BYTES = 1 << 20


class ReadyFile:
    """Written in one step when a cluster is ready, removed when it stops.

    A file that an earlier cluster has left is removed at once; any other file is refused.

    Raises:
        ConfigError: the path cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
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
            ConfigError: it can no longer be written.
        """
        text = f"{json.dumps(content, indent=2)}\n"
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            part.write_text(text, encoding="utf-8")
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

    def _unusable(self, exc: OSError) -> ConfigError:
        return ConfigError(f"--ready-file {self.path} cannot be written: {exc.strerror}")


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
