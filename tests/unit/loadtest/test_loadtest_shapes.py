"""Load shapes, and when a user sends."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pagewire.loadtest.shapes import (
    SHAPES,
    AlignedPace,
    LoadStage,
    PoissonPace,
    ShapeName,
    durations,
    schedule,
    stage_at,
)


def test_steps_go_from_rate_to_rate() -> None:
    stages = schedule("steps", [1, 2, 4], 20)
    assert stages == [LoadStage(0, 20, 1), LoadStage(20, 40, 2), LoadStage(40, 60, 4)]


def test_ramp_rises_evenly_from_the_first_to_the_last_rate() -> None:
    rates = [stage.rate for stage in schedule("ramp", [1, 10], 20)]
    assert rates == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])


def test_bursts_return_to_the_lowest_rate() -> None:
    stages = schedule("burst", [2, 8], 20)
    assert [stage.rate for stage in stages] == [2, 8, 2, 8]
    assert durations(stages) == {2: 30.0, 8: 10.0}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_takes_the_same_time_without_gaps(shape: ShapeName) -> None:
    stages = schedule(shape, [1, 3, 5], 10)
    assert stages[0].start == 0
    assert stages[-1].end == pytest.approx(30)
    assert all(a.end == b.start for a, b in pairwise(stages))
    assert sum(durations(stages).values()) == pytest.approx(30)


@pytest.mark.parametrize(("rates", "stage_s"), [([], 5), ([0], 5), ([1, -1], 5), ([1], 0)])
def test_a_load_of_nothing_is_refused(rates: list[float], stage_s: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        schedule("steps", rates, stage_s)


def test_stage_of_a_moment() -> None:
    stages = schedule("steps", [1, 2], 10)
    assert [stage_at(stages, t) for t in (0, 9.9, 10, 20)] == [
        stages[0],
        stages[0],
        stages[1],
        None,
    ]


def test_poisson_pace_keeps_its_rate_whatever_the_answers_take() -> None:
    pace, now = PoissonPace(random.Random(1), rate=2.0), 100.0
    for _ in range(4000):
        now += pace.wait(now)
        now += 0.1  # the answer
    assert 4000 / (now - 100.0) == pytest.approx(2.0, rel=0.1)


def test_poisson_pace_sends_at_once_when_late_and_does_not_catch_up() -> None:
    pace = PoissonPace(random.Random(1), rate=2.0)
    first = pace.wait(0.0)
    assert first > 0
    assert pace.wait(1000.0) == 0.0
    assert pace.wait(1000.0) > 0.0


def test_aligned_paces_meet() -> None:
    paces = [AlignedPace(0.25) for _ in range(3)]
    moments = {now + pace.wait(now) for now, pace in zip((8.1, 9.0, 11.5), paces, strict=True)}
    assert moments == {12.0}
