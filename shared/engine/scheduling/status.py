"""A request in an engine: its status and the legal transitions between statuses.

    WAITING ----> RUNNING ----> FINISHED_*          (aggregated, or a prefill job)
      |  ^          |
      |  +-PREEMPTED+
      v
    RESERVED ---> RUNNING                           (KV arrives from a prefill worker)
      |
      +---------> WAITING                           (prefill worker lost: prefill locally)

Terminal statuses are reachable from everywhere.
"""

from __future__ import annotations

import enum

from pagewire.shared.base.errors import IllegalTransitionError
from pagewire.shared.control.protocol import FinishReason


class RequestStatus(enum.Enum):
    """Where a request stands in one engine."""

    WAITING = enum.auto()
    RESERVED = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether the request will not run again."""
        return self in _FINISH_REASONS

    @property
    def finish_reason(self) -> FinishReason | None:
        """The OpenAI-style reason of a terminal status, else None."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}

LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.RESERVED}),
    RequestStatus.RESERVED: frozenset({RequestStatus.RUNNING, RequestStatus.WAITING}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING}),
}


def check_transition(current: RequestStatus, new: RequestStatus) -> None:
    """Allow a status change or say why not.

    Raises:
        IllegalTransitionError: the table has no such transition.
    """
    if current.is_finished or not (new.is_finished or new in LEGAL_TRANSITIONS[current]):
        raise IllegalTransitionError(f"{current.name} does not lead to {new.name}")
