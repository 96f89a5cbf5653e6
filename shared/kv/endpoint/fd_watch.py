"""The file descriptors for which the engine's thread wakes up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing(_fd: int) -> None:
    """Whoever has no thread to wake looks by itself."""


@dataclass(frozen=True, slots=True)
class FdWatch:
    """Adds and removes them; in the engine's thread, or before it starts."""

    add: Callable[[int], None] = _nothing
    remove: Callable[[int], None] = _nothing
