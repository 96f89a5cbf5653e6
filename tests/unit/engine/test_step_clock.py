"""Which step runs, how long it took, and who is suspected when it does not end."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry

from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.scheduling.decode_batch import DecodeRows
from pagewire.shared.engine.scheduling.schedule import Schedule, ScheduledTokens
from pagewire.shared.engine.scheduling.step import DeviceTimes
from pagewire.shared.engine.step_clock import RunningStep, StepClock
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.worker.metrics import EngineCollector
from pagewire.tests.support.fake_engine import make_core, make_sequence


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


def test_the_devices_clock_says_how_long_a_step_took() -> None:
    """The host notes the end of the first step late, since it launches the second one."""
    clocked = Clocked()
    clocked.at(1.0).begin(Schedule())
    clocked.at(1.5).begin(Schedule())
    clocked.at(3.0).finish(DeviceTimes(since_start_s=0.6, since_last_end_s=9.0))
    clocked.at(3.1).finish(DeviceTimes(since_start_s=1.2, since_last_end_s=1.3))
    clocked.at(5.0).begin(Schedule())
    clocked.at(6.0).finish(DeviceTimes(since_start_s=0.7, since_last_end_s=2.7))
    assert clocked.learnt.seconds == [0.6, 1.3, 0.7]


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


def test_the_metric_says_how_right_predictions_are() -> None:
    core, name = make_core()[0], "pagewire_step_prediction_error"

    def shown(steps: str) -> float | None:
        registry = CollectorRegistry()
        registry.register(EngineCollector(EngineThread(core, lambda _outputs: None), "m"))
        return registry.get_sample_value(name, {"steps": steps})

    assert [shown("all"), shown("prompt")] == [pytest.approx(math.nan, nan_ok=True)] * 2
    for _ in range(20):
        core.scheduler.costs.observe(StepWork(1), 0.01)
    assert shown("all") == pytest.approx(0, abs=0.1)
    assert shown("prompt") == pytest.approx(math.nan, nan_ok=True)
