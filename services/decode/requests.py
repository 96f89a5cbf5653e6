"""What a decode service keeps for each request, apart from its sequence in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.shared.control.protocol import Generate, Timings
from pagewire.shared.kv.endpoint.expectations import Expected
from pagewire.shared.kv.job_messages import Prefill
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
    """

    peer_id: str
    message: Generate
    engine_id: str
    group: list[DecodeRequest] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    is_remote: bool = False
    first_token: int | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def local_reason(self) -> LocalPrefill | None:
        """Why this worker was to compute the prompt from the start; None if it was not."""
        if self.is_remote or self is not self.group[0]:
            return None
        return "short" if self.message.prefill_workers else "no_worker"

    def timings(self) -> Timings:
        """Where the time until the first decode step went."""
        return Timings(queue_s=self.queue_s, prefill_s=self.prefill_s, transfer_s=self.transfer_s)

    def ticket(self, expected: Expected) -> Prefill:
        """Return the message that asks a prefill worker for this request's blocks."""
        return Prefill(
            job_id=expected.job,
            token_ids=[*self.message.prompt_token_ids, *self.message.output_token_ids],
            num_prompt_tokens=len(self.message.prompt_token_ids),
            spec=self.message.spec,
            first_block=expected.coverage.positions.start,
        )
