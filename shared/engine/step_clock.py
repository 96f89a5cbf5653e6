"""Which step runs, since when, and how long steps take: one clock for all that want to know.

The engine's thread writes it. Other threads read `current` and `finished`.

    begin -----> finish                     the step's own time begins when the one before has ended
      begin ------------> finish
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.scheduling.schedule import Schedule
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.step import DeviceTimes


@dataclass(frozen=True, slots=True, eq=False)
class RunningStep:
    """A step that has been launched and has not ended.

    Attributes:
        schedule: the sequences that it computes.
        began_s: when it was launched.
        predicted_s: how long steps with such work have taken.
    """

    schedule: Schedule
    work: StepWork
    began_s: float
    predicted_s: float

    @property
    def suspects(self) -> list[Sequence]:
        """The sequences that may be why, if it hangs or fails."""
        return suspects_of(self.schedule)

    @property
    def crash_suspects(self) -> list[Sequence]:
        """The sequences that may be why, if it crashes.

        A crash costs nobody an error unless it happens twice. So without chunks and suspects all
        rows are suspected, and run one at a time in the next worker.
        """
        suspects = self.suspects
        if self.schedule.chunks or not suspects or suspects[0].strikes:
            return suspects
        return self.schedule.rows.sequences


def suspects_of(schedule: Schedule) -> list[Sequence]:
    """Return who may be why a step hangs or fails.

    A sequence that is suspected already comes first; the scheduler runs one at a time. Otherwise it
    is the sequences of the step's chunks, else its newest row. Nobody is suspected if the step is
    spoilt: the step before it may be why.
    """
    if schedule.is_spoilt:
        return []
    if suspected := [sequence for sequence in schedule.computed if sequence.strikes]:
        return suspected
    chunks, rows = [chunk.sequence for chunk in schedule.chunks], schedule.rows.sequences
    return chunks or ([max(rows, key=lambda sequence: sequence.arrival_s)] if rows else [])


OnStepChange = Callable[[RunningStep | None], None]


def unobserved(_step: RunningStep | None) -> None:
    """Ignore which step runs."""


@dataclass(slots=True)
class StepClock:
    """Measures how long steps take, and knows the one that runs.

    Attributes:
        costs: learns from each step that ends.
        on_change: called with the newest step that runs, or None, when that changes. A crash in
            native code happens in the newest: what fails on the device is an error when it is read.
        finished: number of steps that have ended, well or not.
        usual_s: a short time that a step often takes; it follows slower steps by and by.
    """

    costs: StepCosts = field(default_factory=StepCosts)
    clock: Callable[[], float] = time.monotonic
    on_change: OnStepChange = unobserved
    finished: int = 0
    usual_s: float = 0.01
    _running: deque[RunningStep] = field(default_factory=deque)
    _ended_s: float = 0.0
    _last: RunningStep | None = None

    @property
    def current(self) -> RunningStep | None:
        """The oldest step that runs; if a step's failure has ended the engine, that step."""
        try:
            return self._last or self._running[0]
        except IndexError:  # another thread may end it at any moment
            return None

    def begin(self, schedule: Schedule) -> None:
        """Note that a step is about to be launched."""
        work = schedule.work
        step = RunningStep(schedule, work, self.clock(), self.costs.predict(work))
        self._running.append(step)
        self.on_change(step)

    def finish(self, times: DeviceTimes | None = None) -> None:
        """Note that the oldest step has ended, and learn from it.

        Args:
            times: by the device's clock; None if it has none.
        """
        now, step = self.clock(), self._running.popleft()
        seconds = now - max(step.began_s, self._ended_s)
        if times is not None:
            was_idle = step.began_s >= self._ended_s
            seconds = times.since_start_s if was_idle else times.since_last_end_s
        self._ended_s, self.finished = now, self.finished + 1
        self._report_end()
        self.usual_s = min(seconds, self.usual_s * 1.02)
        self.costs.observe(step.work, seconds)

    def withdraw(self) -> None:
        """Note that the newest step could not be launched."""
        self._running.pop()
        self.finished += 1
        self.on_change(self._running[-1] if self._running else None)

    def fail(self) -> None:
        """Note that the oldest step has failed, or has ended after one that failed."""
        self._ended_s = self.clock()
        self._running.popleft()
        self.finished += 1
        self._report_end()

    def end_with(self, schedule: Schedule) -> None:
        """Note that the failure of a step ends the engine; others may be on the device."""
        self._last = next(step for step in self._running if step.schedule is schedule)

    def _report_end(self) -> None:
        if not self._running:
            self.on_change(None)
