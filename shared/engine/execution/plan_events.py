"""Maps each plan's number to the CUDA events that are recorded in it and after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.shared.engine.execution.cuda_graph import DeviceEvent
from pagewire.shared.errors import IntegrityError


@dataclass(slots=True)
class PlanEvents:
    """The events of those plans whose ends somebody waits for.

    An event that has been reached is forgotten when the next is noted: nobody needs to wait for it.
    """

    _events: dict[int, list[DeviceEvent]] = field(default_factory=dict)  # ascending by plan
    _newest: int = 0

    def note(self, plan: int, events: list[DeviceEvent]) -> None:
        """Note where a plan's work ends, or where each layer group of its blocks is final.

        What was noted of this plan before stays: its last event is late enough.
        """
        for number in list(self._events):
            if not all(event is None or event.query() for event in self._events[number]):
                break
            del self._events[number]
        self._events.setdefault(plan, events)
        self._newest = max(self._newest, plan)

    def has_group_events(self, plan: int) -> bool:
        """Whether a plan's layer groups have events each; asked before the next is noted."""
        return len(self._events.get(plan, ())) > 1

    def find(self, plan: int, group: int) -> DeviceEvent:
        """Return the event after which a layer group is final; None if that has been reached.

        Raises:
            IntegrityError: nothing was noted of the plan.
        """
        if plan > self._newest:
            raise IntegrityError(f"no event was recorded at the end of plan {plan}")
        events = self._events.get(plan, [None])
        return events[min(group, len(events) - 1)]
