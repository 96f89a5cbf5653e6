"""What a decode service keeps for each request, apart from its sequence in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.shared.control.protocol import Generate, Timings
from pagewire.shared.kv.endpoint.expectations import Expected
from pagewire.shared.kv.job_messages import Prefill
from pagewire.shared.logs import about
from pagewire.shared.tracing import Attributes, TracedSpan
from pagewire.shared.worker.metrics import LocalPrefill


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request of a router.

    The event loop owns it. What the engine's thread learns of its prefill job, it writes here
    before it hands over the outputs that depend on it.

    Attributes:
        engine_id: its name in the engine, unique whatever routers call it.
        group: the requests that came in one message, this one among them; the first one's prompt
            is computed, and the others fork from it.
        tried: prefill workers that were asked.
        is_remote: blocks were reserved for what a prefill worker sends.
        first_token: sampled by a prefill worker.
        arrived_s: when its message came, on the monotonic clock.
        timings: as far as they are known.
        span: of the request at this worker, if it is traced.
    """

    peer_id: str
    message: Generate
    engine_id: str
    group: list[DecodeRequest] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    is_remote: bool = False
    first_token: int | None = None
    arrived_s: float = 0.0
    timings: Timings = field(default_factory=Timings)
    span: TracedSpan | None = None

    @property
    def local_reason(self) -> LocalPrefill | None:
        """Why this worker was to compute the prompt from the start; None if it was not."""
        if self.is_remote or self is not self.group[0]:
            return None
        return "short" if self.message.prefill_workers else "no_worker"

    @property
    def log(self) -> dict[str, Any]:
        """The `extra` of log lines about it."""
        return about(self.message.spec.log_id)

    def time(self, **found: Any) -> None:
        """Set fields of its `timings`."""
        self.timings = msgspec.structs.replace(self.timings, **found)

    def note_transfer(self) -> None:
        """Make the span of the KV's arrival, if the request is traced."""
        if self.span is not None:
            about: Attributes = {
                "pagewire.kv_bytes": self.timings.kv_bytes,
                "pagewire.segments": self.timings.segments,
                "pagewire.carrier": self.timings.carrier or "",
            }
            self.span.note_child("transfer", self.timings.arriving_s, about)

    def end_span(self, reason: str, error: str | None = None) -> None:
        """End its span, if it is traced."""
        if self.span is not None:
            about: Attributes = {
                "pagewire.finish_reason": reason,
                "pagewire.queued_s": self.timings.wait_s or self.timings.queue_s,
                "pagewire.prefill_worker": self.timings.prefill_worker or "",
            }
            self.span.end(about, error)

    def ticket(self, expected: Expected) -> Prefill:
        """Return the message that asks a prefill worker for this request's blocks."""
        return Prefill(
            job_id=expected.job,
            token_ids=[*self.message.prompt_token_ids, *self.message.output_token_ids],
            num_prompt_tokens=len(self.message.prompt_token_ids),
            spec=self.message.spec,
            first_block=expected.coverage.positions.start,
            trace=None if self.span is None else self.span.trace,
        )
