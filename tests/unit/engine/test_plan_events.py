from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.execution.cuda_graph import DeviceEvent
from pagewire.shared.engine.execution.plan_events import PlanEvents


@dataclass(eq=False)
class Event:
    """A point in a device's work."""

    reached: bool = False

    def query(self) -> bool:
        return self.reached


def device_events(count: int) -> list[DeviceEvent]:
    return [cast("DeviceEvent", Event()) for _ in range(count)]


def test_a_layer_group_is_final_at_its_own_event_or_at_the_plans_end() -> None:
    events, groups, end = PlanEvents(), device_events(3), device_events(1)
    events.record(1, groups)
    assert events.has_group_events(1)
    events.record(2, end)
    assert not events.has_group_events(2)
    assert [events.find(1, group) for group in range(3)] == groups
    assert [events.find(2, group) for group in range(3)] == end * 3


def test_what_has_been_reached_is_forgotten_and_nobody_waits_for_it() -> None:
    events = PlanEvents()
    first, second = device_events(2), device_events(1)
    events.record(1, first)
    events.record(3, second)
    cast("Event", first[0]).reached = True
    events.record(4, device_events(1))
    assert events.find(1, 1) is first[1]  # one of its groups has not been reached
    cast("Event", first[1]).reached = True
    events.record(5, device_events(1))
    assert events.find(1, 1) is None
    assert events.find(3, 0) is second[0]


def test_first_events_of_a_plan_stay() -> None:
    events, groups = PlanEvents(), device_events(2)
    events.record(1, groups)
    events.record(1, device_events(1))
    assert events.find(1, 1) is groups[1]


def test_plan_that_has_not_run_cannot_be_waited_for() -> None:
    events = PlanEvents()
    events.record(2, device_events(1))
    with pytest.raises(IntegrityError, match="plan 3"):
        events.find(3, 0)
