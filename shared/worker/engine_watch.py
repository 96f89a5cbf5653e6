"""Distinguishes an engine that hangs from one that computes, and from a process that was stopped.

The longest silence that is in order follows the predicted time of the step under way:

    limit = step_timeout_s + 4 * predicted

Without a step it is the same, with 0 as the predicted time, and at least some seconds.
After half of it the worker takes no new requests, and after all of it the worker ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from pagewire.shared.engine.step_clock import RunningStep
from pagewire.shared.worker.processor_waits import ProcessorWaits

MAX_POLL_INTERVAL_S = 1.0
MIN_IDLE_LIMIT_S = 4.0  # an idle loop sleeps for half a second at a time
LEAST_SHARE = 0.25  # of the time that counts, however long threads waited for a processor
SLOWER = 4.0  # on a busy machine, steps take longer than predicted


class Watched(Protocol):
    """A loop in its own thread, which runs steps."""

    @property
    def heartbeat(self) -> int:
        """Changes with each step that ends, and without a step with each iteration."""
        ...

    @property
    def step(self) -> RunningStep | None:
        """The oldest step that has not ended; None if no step runs."""
        ...

    def is_running(self) -> bool:
        """Whether the thread that runs the loop lives."""
        ...


class EngineWatch:
    """Polls the engine's heartbeat, and adds up the time in which it did not change.

    If the whole process is stopped (by a signal, a paused container or a suspended machine), the
    caller does not poll either. So the time since the last poll counts as `interval_s` at most.
    Poll that often. The time in which a thread of this process waited for a processor hardly
    counts: on a busy machine a step takes longer.

    Attributes:
        step: the oldest step that ran at the last poll.
        silence_s: how long the heartbeat has not changed, as of the last poll.
        limit_s: after this silence the engine counts as hanging, as of the last poll.
        interval_s: the longest time between two polls.
    """

    def __init__(
        self,
        engine: Watched,
        step_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] | None = None,
    ) -> None:
        self._engine, self._timeout_s, self._clock = engine, step_timeout_s, clock
        self._waited = waited or ProcessorWaits().since_last
        self.interval_s = min(MAX_POLL_INTERVAL_S, step_timeout_s / 4)
        self.step: RunningStep | None = None
        self.silence_s, self.limit_s = 0.0, step_timeout_s
        self._heartbeat: int | None = None
        self._polled_s = clock()

    @property
    def has_ended(self) -> bool:
        """Whether the engine's thread has ended."""
        return not self._engine.is_running()

    @property
    def hangs(self) -> bool:
        """Whether the engine's thread lives and has been silent for longer than the limit."""
        return not self.has_ended and self.silence_s > self.limit_s

    @property
    def is_well(self) -> bool:
        """Whether new requests may come: the engine runs and is not suspiciously silent."""
        return not self.has_ended and self.silence_s <= self.limit_s / 2

    def poll(self) -> None:
        """Read the engine's heartbeat, and measure how long it has been silent."""
        self.step = self._engine.step  # before the heartbeat: if it ends meanwhile, that changes
        if self.step is None:
            self.limit_s = max(self._timeout_s, MIN_IDLE_LIMIT_S)
        else:
            self.limit_s = self._timeout_s + SLOWER * self.step.predicted_s
        now, heartbeat = self._clock(), self._engine.heartbeat
        if self.has_ended or heartbeat != self._heartbeat:
            self._heartbeat, self.silence_s = heartbeat, 0.0
        else:
            passed_s = min(now - self._polled_s, self.interval_s)
            self.silence_s += max(LEAST_SHARE * passed_s, passed_s - self._waited())
        self._polled_s = now
