"""What a decode service keeps for each request, apart from its sequence in the engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from pagewire.shared.control.protocol import Generate, Prefill, Timings
from pagewire.shared.worker.metrics import LocalPrefill


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """One prefill job, as the decode worker that asked for it sees it.

    Attributes:
        deadline: fires if the job shows no sign of life.
        done_s: when `PrefillDone` came.
        activated_s: when the sequence ran on with its blocks; 0 before that.
    """

    job_id: str
    link: Any
    deadline: asyncio.TimerHandle | None = None
    done_s: float = 0.0
    activated_s: float = 0.0

    def note_activated(self) -> None:
        """The sequence runs on. Called in the engine's thread."""
        self.activated_s = time.monotonic()

    def stop_deadline(self) -> None:
        """Wait no longer."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request of a router.

    Attributes:
        engine_id: its name in the engine, unique whatever routers call it.
        group: the requests that came in one message, this one among them; the first one's prompt
            is computed, and the others fork from it.
        tried: prefill workers that failed it.
        num_blocks: blocks reserved for what a prefill worker sends; 0 if none does.
    """

    peer_id: str
    message: Generate
    engine_id: str
    group: list[DecodeRequest] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    first_block: int = 0
    num_blocks: int = 0
    remote: RemotePrefill | None = None
    first_token: int | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def local_reason(self) -> LocalPrefill | None:
        """Why this worker was to compute the prompt from the start; None if it was not."""
        if self.num_blocks or self is not self.group[0]:
            return None
        return "short" if self.message.prefill_workers else "no_worker"

    @property
    def token_ids(self) -> list[int]:
        """All that is to be prefilled."""
        return [*self.message.prompt_token_ids, *self.message.output_token_ids]

    def timings(self) -> Timings:
        """Where the time until the first decode step went."""
        return Timings(queue_s=self.queue_s, prefill_s=self.prefill_s, transfer_s=self.transfer_s)

    def ticket(self, job_id: str, decode_id: str, decode_epoch: int, prefill_epoch: int) -> Prefill:
        """Return the message that asks a prefill worker for this request's blocks."""
        return Prefill(
            job_id=job_id,
            decode_id=decode_id,
            decode_epoch=decode_epoch,
            prefill_epoch=prefill_epoch,
            token_ids=self.token_ids,
            spec=self.message.spec,
            first_block=self.first_block,
        )
