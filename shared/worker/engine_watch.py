"""Distinguishes an engine that hangs from a process that was stopped as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

LOOK_INTERVAL_S = 1.0


class Beating(Protocol):
    """A loop in a thread of its own."""

    @property
    def turns(self) -> int:
        """Grows with every turn."""
        ...

    def is_running(self) -> bool:
        """Whether the thread lives."""
        ...


class EngineWatch:
    """Looks at the engine's turns, and adds up the time in which there were none.

    Whoever looks stands still with a process that is stopped (by a signal, a paused container or a
    suspended machine). What passed since the look before is therefore not all the engine's
    silence: it counts as one interval between looks at most. Look that often.
    """

    def __init__(self, engine: Beating, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._turns, self._looked_s, self._silence_s = -1, clock(), 0.0

    def look(self, max_silence_s: float) -> bool:
        """Return whether the engine runs and has not been silent for longer than that."""
        now = self._clock()
        is_running = self._engine.is_running()
        if not is_running or self._engine.turns != self._turns:
            self._turns, self._silence_s = self._engine.turns, 0.0
        else:
            self._silence_s += min(now - self._looked_s, LOOK_INTERVAL_S)
        self._looked_s = now
        return is_running and self._silence_s <= max_silence_s
