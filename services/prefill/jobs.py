"""One prefill job, from its ticket to the acknowledgement of its last block."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pagewire.services.prefill.spans import Span
from pagewire.shared.protocol import Prefill

MAX_SENDS_PER_PIECE = 3


@dataclass(slots=True, eq=False)
class PrefillJob:
    """What the service knows of a job; the engine has the sequence.

    Attributes:
        peer_id: control connection that it came over.
        ticket: the message that asked for it.
        num_blocks: of the prompt, the last and partial one included.
        parts_per_block: what a block is divided into.
        spans: piece -> what it has, of the pieces that were packed so far.
        acked: pieces that the decode worker has scattered.
        sends: piece -> how often it was sent, or is to be as soon as it is packed.
        timers: piece -> end of the wait for its acknowledgement.
        has_first_token: `PrefillDone` was posted.
    """

    peer_id: str
    ticket: Prefill
    num_blocks: int
    parts_per_block: int
    spans: dict[int, Span] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    sends: dict[int, int] = field(default_factory=dict)
    timers: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    has_first_token: bool = False

    @property
    def job_id(self) -> str:
        """As the decode worker named it."""
        return self.ticket.job_id

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it is needed here any more."""
        acked = sum(self.spans[piece].num_units for piece in self.acked)
        wanted = (self.num_blocks - self.ticket.first_block) * self.parts_per_block
        return self.has_first_token and acked >= wanted

    def note_packed(self, piece: int, span: Span) -> None:
        """Note a piece that was packed; its first sending counts with this."""
        self.spans[piece] = span
        self.sends.setdefault(piece, 1)

    def note_acked(self, piece: int) -> None:
        """Count a piece as scattered; a second acknowledgement changes nothing."""
        self.acked.add(piece)
        self.stop_timer(piece)

    def stop_timer(self, piece: int) -> None:
        """Wait no longer for a piece's acknowledgement."""
        timer = self.timers.pop(piece, None)
        if timer is not None:
            timer.cancel()

    def stop_timers(self) -> None:
        """Wait no longer for any acknowledgement."""
        for piece in list(self.timers):
            self.stop_timer(piece)

    def count_again(self, piece: int) -> bool:
        """Count one more sending of a piece, unless it was sent too often."""
        if self.sends[piece] >= MAX_SENDS_PER_PIECE:
            return False
        self.sends[piece] += 1  # now: who asks often must not queue more than is ever sent
        return True
