"""What steps cost, which one runs, and who is suspected when it does not end."""

from __future__ import annotations

import random

import pytest

from pagewire.shared.engine.scheduling.decode_batch import DecodeRows
from pagewire.shared.engine.scheduling.schedule import Schedule, ScheduledTokens
from pagewire.shared.engine.scheduling.step_costs import SMALLEST_CHUNK, StepCosts, StepWork
from pagewire.shared.engine.step_clock import RunningStep, StepClock
from pagewire.tests.support.fake_engine import make_sequence


def seconds(work: StepWork) -> float:
    """What a step takes on an imagined machine."""
    return 0.003 + 2e-4 * work.rows + 1e-4 * work.tokens + 2e-8 * work.products


def some_work(rng: random.Random) -> StepWork:
    if rng.random() < 0.3:
        return StepWork(rng.randrange(1, 8))
    chunk = rng.choice([16, 64, 256, 1024])
    return StepWork(rng.randrange(5)).with_chunk(rng.randrange(20_000), chunk)


UNSEEN = [
    StepWork(1),
    StepWork(20),
    StepWork().with_chunk(0, 2048),
    StepWork(3).with_chunk(30_000, 128),
]


def test_two_small_steps_are_enough_for_a_first_guess() -> None:
    costs = StepCosts()
    assert costs.predict(UNSEEN[2]) == 0.0
    for start in (0, 1024):
        work = StepWork().with_chunk(start, 16)
        costs.observe(work, seconds(work))
    assert costs.predict(UNSEEN[2]) == pytest.approx(seconds(UNSEEN[2]), rel=2)


def test_predictions_are_right_for_work_that_was_not_seen() -> None:
    costs, rng = StepCosts(), random.Random(0)
    for _ in range(200):
        work = some_work(rng)
        costs.observe(work, seconds(work) * rng.uniform(0.95, 1.05))
    for work in UNSEEN:
        assert costs.predict(work) == pytest.approx(seconds(work), rel=0.15)


def test_the_price_of_prompts_outlasts_a_time_without_any() -> None:
    costs, rng = StepCosts(), random.Random(0)
    for _ in range(100):
        work = some_work(rng)
        costs.observe(work, seconds(work))
    for _ in range(5000):
        costs.observe(StepWork(3), seconds(StepWork(3)))
    assert costs.predict(UNSEEN[2]) == pytest.approx(seconds(UNSEEN[2]), rel=0.1)


def test_a_machine_that_becomes_slower_is_followed_within_some_steps() -> None:
    costs, rng = StepCosts(), random.Random(0)
    for _ in range(100):
        work = some_work(rng)
        costs.observe(work, seconds(work))
    for _ in range(100):
        work = some_work(rng)
        costs.observe(work, 4 * seconds(work))
    for work in UNSEEN:
        assert costs.predict(work) == pytest.approx(4 * seconds(work), rel=0.25)


@pytest.mark.parametrize("start", [0, 5000, 100_000])
def test_a_chunk_takes_about_the_time_that_is_asked_for(start: int) -> None:
    costs, rng = StepCosts(), random.Random(0)
    for _ in range(200):
        work = some_work(rng)
        costs.observe(work, seconds(work))
    rest = StepWork(4)
    tokens = costs.tokens_within(1.0, rest, start)
    assert tokens % SMALLEST_CHUNK == 0
    assert 0.6 < seconds(rest.with_chunk(start, tokens)) < 1.1


def test_a_step_always_has_room_for_one_small_chunk() -> None:
    costs = StepCosts()
    work = StepWork().with_chunk(0, 16)
    costs.observe(work, 30.0)
    assert costs.tokens_within(1.0, StepWork(), 0) == SMALLEST_CHUNK
    assert costs.tokens_within(1.0, work, 0) == 0


class Learnt(StepCosts):
    """Keeps the durations from which it should learn."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def observe(self, work: StepWork, seconds: float) -> None:
        self.seconds.append(seconds)


class Clocked:
    """A clock of steps whose time is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.learnt = Learnt()
        self.clock = StepClock(self.learnt, lambda: self.now)

    def began_s(self) -> float | None:
        step = self.clock.current
        return None if step is None else step.began_s

    def at(self, now: float) -> StepClock:
        self.now = now
        return self.clock


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    clocked = Clocked()
    clocked.at(1.0).begin(Schedule())
    clocked.at(1.5).begin(Schedule())
    assert clocked.began_s() == 1.0
    clocked.at(3.0).finish()
    assert clocked.began_s() == 1.5
    clocked.at(4.0).finish()
    assert clocked.began_s() is None
    assert clocked.learnt.seconds == [2.0, 1.0]
    assert clocked.clock.finished == 2


def test_steps_that_fail_teach_nothing() -> None:
    clocked = Clocked()
    clocked.at(1.0).begin(Schedule())
    clocked.clock.begin(Schedule())
    clocked.at(2.0).withdraw()
    clocked.at(3.0).fail()
    assert clocked.began_s() is None
    assert (clocked.learnt.seconds, clocked.clock.finished) == ([], 2)


def test_step_that_ends_the_engine_stays_the_current_one() -> None:
    clocked, last = Clocked(), Schedule()
    clocked.at(1.0).begin(Schedule())
    clocked.at(2.0).begin(last)
    assert clocked.began_s() == 1.0
    clocked.clock.end_with(last)
    assert clocked.began_s() == 2.0


def chunks(*lengths: int) -> list[ScheduledTokens]:
    return [
        ScheduledTokens(make_sequence(f"c{number}", [1]), 0, length, samples=False)
        for number, length in enumerate(lengths)
    ]


def suspected(schedule: Schedule) -> list[str]:
    step = RunningStep(schedule, schedule.work, 0.0, 0.0)
    return [sequence.request_id for sequence in step.suspects]


@pytest.mark.parametrize("lengths", [(5,), (5, 6), (2, 300, 2)])
def test_the_prompts_of_a_step_are_suspected(lengths: tuple[int, ...]) -> None:
    rows = DecodeRows([make_sequence("row", [1])])
    schedule = Schedule(chunks=chunks(*lengths), rows=rows)
    assert suspected(schedule) == [f"c{number}" for number in range(len(lengths))]


def test_nobody_is_suspected_in_a_step_after_one_that_failed() -> None:
    assert suspected(Schedule(chunks=chunks(5), is_spoilt=True)) == []


def test_without_prompts_the_newest_row_is_suspected() -> None:
    rows = [make_sequence(name, [1]) for name in "abc"]
    for sequence, arrival_s in zip(rows, (1.0, 3.0, 2.0), strict=True):
        sequence.arrival_s = arrival_s
    assert suspected(Schedule(rows=DecodeRows(rows))) == ["b"]
