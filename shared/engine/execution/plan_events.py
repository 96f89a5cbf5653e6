"""Maps each plan's number to the CUDA events that are recorded in it and after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.execution.cuda_graph import DeviceEvent


@dataclass(slots=True)
class PlanEvents:
    """The events of plans that other work may have to wait for.

    An event that has been reached is forgotten when the next one is recorded.
    """

    _events: dict[int, list[DeviceEvent]] = field(default_factory=dict)  # ascending by plan
    _newest: int = 0

    def record(self, plan: int, events: list[DeviceEvent]) -> None:
        """Store the event at a plan's end, or the events after which its layer groups are final.

        Events that were stored for this plan before stay: the last one is late enough.
        """
        for number in list(self._events):
            if not all(event is None or event.query() for event in self._events[number]):
                break
            del self._events[number]
        self._events.setdefault(plan, events)
        self._newest = max(self._newest, plan)

    def has_group_events(self, plan: int) -> bool:
        """Whether each layer group of a plan has an event; call this before the next `record`."""
        return len(self._events.get(plan, ())) > 1

    def find(self, plan: int, group: int) -> DeviceEvent:
        """Return the event after which a layer group is final; None if it has been reached.

        Raises:
            IntegrityError: nothing was noted of the plan.
        """
        if plan > self._newest:
            raise IntegrityError(f"no event was recorded at the end of plan {plan}")
        events = self._events.get(plan, [None])
        return events[min(group, len(events) - 1)]
