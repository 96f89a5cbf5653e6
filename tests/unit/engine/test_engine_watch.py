"""When an engine counts as hanging."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.scheduling.schedule import Schedule
from pagewire.shared.engine.step_clock import RunningStep
from pagewire.shared.worker.engine_watch import EngineWatch
from pagewire.shared.worker.processor_waits import ProcessorWaits

TIMEOUT_S = 10.0


@dataclass
class Engine:
    heartbeat: int = 0
    step: RunningStep | None = None
    has_thread: bool = True

    def is_running(self) -> bool:
        return self.has_thread


class Watched:
    """An engine, polled with a clock that is set by hand."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.now = 100.0
        self.engine = Engine()
        self.waited_s = 0.0
        self.watch = EngineWatch(self.engine, timeout_s, lambda: self.now, lambda: self.waited_s)
        self.after(0.0)

    def run_step(self, predicted_s: float) -> None:
        self.engine.step = RunningStep(Schedule(), StepWork(), self.now, predicted_s)

    def after(self, seconds: float) -> str:
        self.now += seconds
        self.watch.poll()
        if self.watch.has_ended:
            return "ended"
        if self.watch.hangs:
            return "hangs"
        return "well" if self.watch.is_well else "silent"


def test_an_engine_whose_heart_beats_is_well():
    watched = Watched()
    for _ in range(20):
        watched.engine.heartbeat += 1
        assert watched.after(1.0) == "well"


def test_an_engine_that_hangs_is_silent_first_and_may_come_back():
    watched = Watched()
    found = [watched.after(1.0) for _ in range(11)]
    assert found == ["well"] * 5 + ["silent"] * 5 + ["hangs"]
    watched.engine.heartbeat += 1
    assert watched.after(1.0) == "well"


@pytest.mark.parametrize("predicted_s", [0.0, 1.0, 30.0])
def test_a_step_may_take_four_times_as_long_as_predicted_and_the_timeout(predicted_s):
    watched = Watched()
    watched.run_step(predicted_s)
    seconds = 0
    while watched.after(1.0) != "hangs":
        seconds += 1
        assert watched.watch.is_well == (seconds <= (TIMEOUT_S + 4 * predicted_s) / 2)
    assert seconds == TIMEOUT_S + 4 * predicted_s


def test_time_without_a_processor_hardly_counts():
    watched = Watched()
    watched.waited_s = 0.9
    found = [watched.after(1.0) for _ in range(41)]
    assert found == ["well"] * 20 + ["silent"] * 20 + ["hangs"]


def test_waits_of_this_process_are_measured():
    waits = ProcessorWaits()
    assert waits.since_last() == 0.0  # nothing is known before
    time.sleep(0.01)
    assert 0.0 <= waits.since_last() < 60.0


def test_a_short_timeout_is_polled_often_enough():
    watched = Watched(timeout_s=0.4)
    watched.run_step(0.0)
    assert watched.watch.interval_s == pytest.approx(0.1)
    assert [watched.after(0.1) for _ in range(5)][-1] == "hangs"


def test_an_idle_engine_may_sleep_longer_than_a_short_timeout():
    watched = Watched(timeout_s=0.4)
    assert {watched.after(0.1) for _ in range(19)} == {"well"}


def test_a_process_that_was_stopped_does_not_count_against_the_engine():
    watched = Watched()
    assert watched.after(3600.0) == "well"
    assert watched.after(3600.0) == "well"
    assert [watched.after(1.0) for _ in range(4)] == ["well"] * 3 + ["silent"]


def test_silence_before_the_start_does_not_count():
    watched = Watched()
    watched.engine.has_thread = False
    assert {watched.after(1.0) for _ in range(20)} == {"ended"}
    watched.engine.has_thread = True
    assert watched.after(1.0) == "well"


def test_an_engine_without_a_thread_has_ended():
    watched = Watched()
    watched.engine.has_thread = False
    watched.engine.heartbeat += 1
    assert watched.after(0.1) == "ended"
