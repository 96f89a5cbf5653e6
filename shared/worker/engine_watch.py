"""Distinguishes an engine that hangs from a process that was stopped as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

POLL_INTERVAL_S = 1.0


class Beating(Protocol):
    """A loop in its own thread, whose iterations show that it is alive."""

    @property
    def iterations(self) -> int:
        """Grows with each iteration."""
        ...

    def is_running(self) -> bool:
        """Whether the thread lives."""
        ...


class EngineWatch:
    """Polls the engine's iterations, and adds up the time in which there were none.

    If the whole process is stopped (by a signal, a paused container or a suspended machine), the
    caller does not poll either. So the time since the last poll counts as one poll interval at
    most. Poll that often.
    """

    def __init__(self, engine: Beating, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._iterations, self._polled_s, self._silence_s = -1, clock(), 0.0

    def poll(self, max_silence_s: float) -> bool:
        """Return whether the engine runs and has not been silent for longer than that."""
        now = self._clock()
        is_running = self._engine.is_running()
        if not is_running or self._engine.iterations != self._iterations:
            self._iterations, self._silence_s = self._engine.iterations, 0.0
        else:
            self._silence_s += min(now - self._polled_s, POLL_INTERVAL_S)
        self._polled_s = now
        return is_running and self._silence_s <= max_silence_s
