"""How the offered load changes over time: pure schedules that locust's shape class follows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ShapeName = Literal["steps", "ramp", "burst"]
SHAPES: tuple[ShapeName, ...] = ("steps", "ramp", "burst")

RAMP_STAGES = 10
BURST_CALM, BURST_PEAK = 0.75, 0.25  # shares of each period


@dataclass(frozen=True)
class LoadStage:
    """A time of constant load.

    Attributes:
        start: seconds since the beginning of the test.
        end: seconds since the beginning of the test.
        rate: requests a second of all users together.
    """

    start: float
    end: float
    rate: float


def schedule(shape: ShapeName, rates: Sequence[float], stage_s: float) -> list[LoadStage]:
    """Return the stages of a shape, one after the other.

    Args:
        shape: "steps" goes from rate to rate, "ramp" from the first to the last in many small
            steps, "burst" between the lowest (most of the time) and the highest.
        rates: at least one, each above 0.
        stage_s: seconds a rate; the whole takes as long for every shape.

    Raises:
        ValueError: there is no rate, or one of them or the duration is not above 0.
    """
    if not rates or min(rates) <= 0 or stage_s <= 0:
        raise ValueError("rates and the stages' duration must be above 0")
    total = stage_s * len(rates)
    if shape == "steps":
        return _chain([(stage_s, rate) for rate in rates])
    if shape == "ramp":
        slope = (rates[-1] - rates[0]) / (RAMP_STAGES - 1)
        return _chain([(total / RAMP_STAGES, rates[0] + i * slope) for i in range(RAMP_STAGES)])
    calm, peak = (stage_s * BURST_CALM, min(rates)), (stage_s * BURST_PEAK, max(rates))
    return _chain([calm, peak] * len(rates))


def stage_at(stages: Sequence[LoadStage], t: float) -> LoadStage | None:
    """Return the stage of a moment; None after the last one."""
    return next((stage for stage in stages if t < stage.end), None)


def durations(stages: Sequence[LoadStage]) -> dict[float, float]:
    """Return for how many seconds each rate is offered."""
    durations: dict[float, float] = {}
    for stage in stages:
        durations[stage.rate] = durations.get(stage.rate, 0.0) + stage.end - stage.start
    return durations


class PoissonPace:
    """When one user sends: at random moments with a mean rate, whatever the answers take.

    All users together are then close to Poisson arrivals. A user that is still waiting for an
    answer when its next moment comes sends at once afterwards, and does not catch up on others.

    Args:
        rng: of this user.
        rate: requests a second of this user.
    """

    def __init__(self, rng: random.Random, rate: float) -> None:
        self._rng, self._rate = rng, rate
        self._due: float | None = None

    def wait(self, now: float) -> float:
        """Return the seconds until the next request."""
        due = now if self._due is None else self._due
        due += self._rng.expovariate(self._rate)
        self._due = max(due, now)
        return self._due - now


class AlignedPace:
    """When users send all at once: at every multiple of a period.

    Args:
        rate: requests a second of one user; the period is its inverse.
    """

    def __init__(self, rate: float) -> None:
        self._period = 1 / rate

    def wait(self, now: float) -> float:
        """Return the seconds until the next common moment."""
        return self._period - now % self._period


def _chain(parts: Sequence[tuple[float, float]]) -> list[LoadStage]:
    stages: list[LoadStage] = []
    start = 0.0
    for duration, rate in parts:
        stages.append(LoadStage(start, start + duration, rate))
        start += duration
    return stages
