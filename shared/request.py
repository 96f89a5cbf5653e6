"""A request: its sampling parameters, its status and the legal ways between statuses.

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
import reprlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pagewire.shared.errors import IllegalTransitionError, InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_STOP_TOKEN_IDS = 64
_INT64 = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when to stop.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 keeps all.
        seed: makes the tokens reproducible; None draws one when the request is made.
        max_tokens: upper bound on generated tokens.
        stop_token_ids: end after any of these; the model's end-of-sequence ids are added to
            them unless `ignore_eos`.
        ignore_eos: generate on past the end of the sequence.

    Raises:
        InvalidRequestError: from `validate`, naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Check the ranges; a NaN fails every comparison and so is refused."""
        checks = (
            (0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100"),
            (0.0 < self.top_p <= 1.0, "top_p", "greater than 0 and at most 1"),
            (0 <= self.top_k < 2**31, "top_k", "0 (all tokens) or a positive integer below 2**31"),
            (1 <= self.max_tokens < 2**31, "max_tokens", "at least 1"),
            (self.seed is None or -_INT64 <= self.seed < _INT64, "seed", "a 64-bit integer"),
            (
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS
                and all(0 <= t < 2**31 for t in self.stop_token_ids),
                "stop_token_ids",
                f"at most {MAX_STOP_TOKEN_IDS} token ids, none negative",
            ),
        )
        for ok, field, rule in checks:
            if not ok:
                value = reprlib.repr(getattr(self, field))
                raise InvalidRequestError(f"{field} must be {rule}, not {value}", field)


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
        IllegalTransitionError: the table has no such way.
    """
    if current.is_finished or not (new.is_finished or new in LEGAL_TRANSITIONS[current]):
        raise IllegalTransitionError(f"{current.name} does not lead to {new.name}")
