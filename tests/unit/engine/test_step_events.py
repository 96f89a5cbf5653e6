"""When steps start and end on a GPU, with events whose times the test sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pagewire.shared.engine.execution.pending import PendingTokens, StepEvents
from pagewire.shared.engine.scheduling.step import DeviceTimes


class Event:
    """An event of a GPU whose clock is a list of milliseconds, the next one first."""

    clock: Iterator[float]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.recorded_ms: float | None = None

    def record(self) -> None:
        assert self.recorded_ms is None
        self.recorded_ms = next(self.clock)

    def synchronize(self) -> None:
        assert self.recorded_ms is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.recorded_ms is not None
        assert end.recorded_ms is not None
        return end.recorded_ms - self.recorded_ms


def test_a_step_is_timed_from_its_start_and_from_the_end_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.clock = iter([100.0, 106.0, 120.0, 150.0])
    first = StepEvents(None)
    tokens = PendingTokens(1, torch.tensor([5]), events=first)
    assert tokens.wait().times == DeviceTimes(0.006, 0.006)
    second = StepEvents(first)  # of a step whose sampling awaits masks: it ends later
    with pytest.raises(AssertionError):
        second.times()
    result = PendingTokens(2, torch.tensor([7]), events=second).wait()
    assert result.times is not None
    assert result.times.since_start_s == pytest.approx(0.03)
    assert result.times.since_last_end_s == pytest.approx(0.044)
    assert result.tokens == [7]


def test_a_cpu_has_no_clock_of_its_own() -> None:
    result = PendingTokens(1, torch.tensor([5])).wait()
    assert (result.tokens, result.times) == ([5], None)
