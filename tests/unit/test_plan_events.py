from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from pagewire.shared.engine.cuda_graph import Marker
from pagewire.shared.engine.plan_events import PlanEvents
from pagewire.shared.errors import IntegrityError


@dataclass(eq=False)
class Event:
    """A point in a device's work."""

    reached: bool = False

    def query(self) -> bool:
        return self.reached


def markers(count: int) -> list[Marker]:
    return [cast("Marker", Event()) for _ in range(count)]


def test_a_part_is_final_at_its_own_event_or_at_the_plans_end() -> None:
    events, parts, end = PlanEvents(), markers(3), markers(1)
    events.note(1, parts)
    assert events.has_parts(1)
    events.note(2, end)
    assert not events.has_parts(2)
    assert [events.find(1, part) for part in range(3)] == parts
    assert [events.find(2, part) for part in range(3)] == end * 3


def test_what_has_been_reached_is_forgotten_and_nobody_waits_for_it() -> None:
    events = PlanEvents()
    first, second = markers(2), markers(1)
    events.note(1, first)
    events.note(3, second)
    cast("Event", first[0]).reached = True
    events.note(4, markers(1))
    assert events.find(1, 1) is first[1]  # one of its parts has not been reached
    cast("Event", first[1]).reached = True
    events.note(5, markers(1))
    assert events.find(1, 1) is None
    assert events.find(3, 0) is second[0]


def test_first_events_of_a_plan_stay() -> None:
    events, parts = PlanEvents(), markers(2)
    events.note(1, parts)
    events.note(1, markers(1))
    assert events.find(1, 1) is parts[1]


def test_plan_that_has_not_run_cannot_be_waited_for() -> None:
    events = PlanEvents()
    events.note(2, markers(1))
    with pytest.raises(IntegrityError, match="plan 3"):
        events.find(3, 0)
