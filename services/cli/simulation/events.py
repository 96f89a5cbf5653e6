"""Runs events in virtual time, in the order of their times; equal times as they were set."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Events:
    """The clock of a simulation, and what happens when.

    Attributes:
        now: seconds since the simulation began.
    """

    now: float = 0.0
    _due: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def clock(self) -> float:
        """Return the time, as the engine's and the router's clocks do."""
        return self.now

    def at(self, time_s: float, event: Callable[[], object]) -> None:
        """Have an event happen at a time, or now if that has passed."""
        heapq.heappush(self._due, (max(time_s, self.now), next(self._numbers), event))

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
        """Have an event happen after a delay."""
        self.at(self.now + delay_s, event)

    def every(self, seconds: float, event: Callable[[], object], first_s: float = 0.0) -> None:
        """Have an event happen again and again."""

        def again() -> None:
            event()
            self.after(seconds, again)

        self.at(first_s, again)

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Let events happen until the simulation is over, or none is left."""
        due = self._due
        while due and not is_over():
            self.now, _, event = heapq.heappop(due)
            event()
