"""What a worker keeps for each request of a router, apart from its sequence in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagewire.shared.base.logs import about
from pagewire.shared.base.tracing import Attributes, TracedSpan
from pagewire.shared.control.protocol import Generate, Timings
from pagewire.shared.transfer.endpoint.receiver_jobs import ReceiverJob
from pagewire.shared.transfer.job_messages import Prefill
from pagewire.shared.worker.metrics import LocalPrefill


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request of a router, from its arrival to its end.

    The event loop owns this object. The engine's thread writes the results of the prefill job here
    before it passes on the outputs that depend on them.

    Attributes:
        peer_id: the router's connection.
        engine_id: the request's name in the engine; unique, unlike the names that routers give.
        group: all requests of the same message, including this one. The first one's prompt is
            computed, and the others fork from it.
        tried: prefill workers that have been sent the job.
        strikes: how strongly it is suspected of making workers hang or die.
        is_remote: blocks were reserved for a prefill worker to fill.
        first_token: the one that a prefill worker sampled; None if there is none yet.
        arrived_s: arrival of the message, on the monotonic clock.
        timings: the durations that are known so far.
        span: this worker's span of the request, if it is traced.
    """

    peer_id: str
    message: Generate
    engine_id: str
    group: list[DecodeRequest] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    strikes: int = 0
    is_remote: bool = False
    first_token: int | None = None
    arrived_s: float = 0.0
    timings: Timings = field(default_factory=Timings)
    span: TracedSpan | None = None

    @property
    def local_reason(self) -> LocalPrefill | None:
        """Why no prefill worker was asked to compute the prompt; None if one was."""
        if self.is_remote or self is not self.group[0]:
            return None
        if self.message.prefill_workers:
            return "short"
        return "no_worker" if self.message.local_tokens is None else "chosen"

    @property
    def log(self) -> dict[str, Any]:
        """The `extra` of log lines about this request."""
        return about(self.message.spec.log_id)

    def time(self, **found: Any) -> None:
        """Set some of the durations in `timings`."""
        self.timings = msgspec.structs.replace(self.timings, **found)

    def add_transfer_span(self) -> None:
        """Add a span for the KV transfer, if the request is traced."""
        if self.span is not None:
            about: Attributes = {
                "pagewire.kv_bytes": self.timings.kv_bytes,
                "pagewire.segments": self.timings.segments,
                "pagewire.transport": self.timings.transport or "",
            }
            self.span.record_child("transfer", self.timings.arriving_s, about)

    def end_span(self, reason: str, error: str | None = None) -> None:
        """End the request's span, if it is traced."""
        if self.span is not None:
            about: Attributes = {
                "pagewire.finish_reason": reason,
                "pagewire.queued_s": self.timings.wait_s or self.timings.queue_s,
                "pagewire.prefill_worker": self.timings.prefill_worker or "",
            }
            self.span.end(about, error)

    def prefill_message(self, job: ReceiverJob) -> Prefill:
        """Return the message that has a prefill worker compute and send this request's blocks."""
        return Prefill(
            job_id=job.name,
            token_ids=[*self.message.prompt_token_ids, *self.message.output_token_ids],
            num_prompt_tokens=len(self.message.prompt_token_ids),
            spec=self.message.spec,
            first_block=job.coverage.blocks.start,
            trace=None if self.span is None else self.span.trace,
            strikes=self.strikes,
        )
