"""Packs the finished blocks of prefill jobs into staging slots, between the engine's steps.

A block is final once the steps launched so far have written all its tokens; packing is queued on
the device behind those steps and beside later ones, so that a chunk's blocks leave while the next
chunk computes. Behind a prompt's last chunk nothing computes that they could hide behind: where
they are many, they leave by parts, each behind the layers that fill it. All of this runs in the
engine's thread. The piece that is packed next is announced by a callback, as soon as its packing
is launched, and handed over by another when it is packed.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.services.prefill.spans import Span, SpanQueue
from pagewire.shared.engine.block_mover import PendingMove
from pagewire.shared.engine.executor import BlockMoves
from pagewire.shared.engine.step import Export, StepPlan
from pagewire.shared.kv_cache.parts import BlockParts
from pagewire.shared.transfer.staging import StagingPool, StagingSlot

logger = logging.getLogger(__name__)

# To move fewer bytes than these takes less than to handle the further pieces. For an 8B Llama they
# are 512 tokens.
DIVIDED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """A piece in its staging slot, packed or being packed.

    Whoever it is handed over to owns the slot; to be told of it before gives no right to that.

    Attributes:
        span: what it has of the sequence.
        seed: of the checksums that are packed with the blocks.
    """

    job_id: str
    piece: int
    span: Span
    seed: int
    slot: StagingSlot
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Milestone:
    """A plan that makes blocks final.

    Attributes:
        final: blocks before this position are final.
        plan: its number.
    """

    final: int
    plan: int


@dataclass(slots=True)
class _Job:
    """A job in the engine.

    Attributes:
        queue: what is still to be packed for the first time.
        blocks: that were exported, by position.
        milestones: how they became final, in order.
        life: grows when the sequence loses its blocks, and blocks and milestones with them.
        begins_run: earlier final blocks had all been packed when the next ones became final.
    """

    queue: SpanQueue
    next_piece: int = 0
    blocks: list[int] = field(default_factory=list)
    milestones: list[_Milestone] = field(default_factory=list)
    life: int = 0
    begins_run: bool = False
    resend: deque[tuple[int, Span]] = field(default_factory=deque)

    @property
    def num_final_blocks(self) -> int:
        """Blocks that may be packed after their milestones."""
        return len(self.blocks)

    def plan_of(self, span: Span) -> int:
        """The plan that makes these blocks final."""
        last = span.positions[-1]
        return next(m.plan for m in self.milestones if m.final > last)

    def lose_blocks(self) -> None:
        """Forget the blocks: they belong to others now."""
        self.blocks.clear()
        self.milestones.clear()
        self.life += 1


@dataclass(frozen=True, slots=True)
class _Packing:
    piece: StagedPiece
    life: int
    move: PendingMove


def _tell_nobody(piece: StagedPiece) -> None:
    """Leave it at `on_packed`."""


@dataclass(slots=True)
class PiecePacker:
    """The step hook of a prefill engine.

    Attributes:
        moves: of the engine's blocks.
        staging: slots of one block or more to pack into; a job waits while none is free.
        parts: of a block.
        on_packed: hands a piece over, in the engine's thread.
        divided_bytes: if a prompt's last step makes more than these final, they leave by parts.
        on_packing: announces the piece that is packed next, unless it is packed at once; the device
            may still be computing its blocks.
        on_dropped: an announced piece will not be handed over after all.
        on_failed: called with the name of a job that was dropped, because packing it failed.
    """

    moves: BlockMoves
    staging: StagingPool
    block_size: int
    parts: BlockParts
    on_packed: Callable[[StagedPiece], None]
    divided_bytes: int = DIVIDED_BYTES
    on_packing: Callable[[StagedPiece], None] = _tell_nobody
    on_dropped: Callable[[StagedPiece], None] = _tell_nobody
    on_failed: Callable[[str], None] = lambda _job_id: None
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _packing: deque[_Packing] = field(default_factory=deque)
    _announced: StagedPiece | None = None  # the first in `_packing`, once it has been announced

    def start(self, job_id: str, first_block: int, receiver_slot_bytes: int) -> None:
        """Pack a job's blocks from `first_block` on, as they become final.

        Args:
            job_id: names its sequence in the engine, and itself in pieces.
            first_block: earlier ones are not wanted.
            receiver_slot_bytes: holds one block or more; a piece fits the slots of both sides.
        """
        slot_bytes = min(self.staging.slot_bytes, receiver_slot_bytes)
        self._jobs[job_id] = _Job(SpanQueue(self.parts, slot_bytes, first_block))

    def send_again(self, job_id: str, piece: int, span: Span) -> None:
        """Pack what a piece had that got lost or damaged once more."""
        if job_id in self._jobs:
            self._jobs[job_id].resend.append((piece, span))

    def drop(self, job_id: str) -> None:
        """Forget a job; its blocks may be freed from now on."""
        self._jobs.pop(job_id, None)

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Pack what is final as far as there are slots, hand over what has been packed."""
        for work in plan.kv if plan is not None else ():
            job = self._jobs.get(work.request_id)
            if job is not None and plan is not None:
                if isinstance(work, Export):
                    self._note_final(job, work, plan.number)
                else:
                    job.lose_blocks()
        for job_id, job in list(self._jobs.items()):
            try:
                self._pack_job(job_id, job)
            except Exception:
                logger.exception("job %s cannot be packed", job_id)
                self.drop(job_id)
                self.on_failed(job_id)
        self._hand_over_packed()
        return bool(self._packing)

    def is_due(self) -> bool:
        """Whether blocks have been packed."""
        return bool(self._packing) and self._packing[0].move.is_done()

    def _pack_job(self, job_id: str, job: _Job) -> None:
        while job.resend and job.resend[0][1].positions[-1] < job.num_final_blocks:
            piece, span = job.resend[0]
            if not self._pack(job_id, job, piece, span):
                return
            job.resend.popleft()
        while (next_span := self._next_span(job_id, job)) is not None:
            if not self._pack(job_id, job, job.next_piece, next_span):
                return
            job.queue.take(next_span)
            job.begins_run = False
            job.next_piece += 1

    def _next_span(self, job_id: str, job: _Job) -> Span | None:
        # A job that waits for slots has none being packed either, but pieces on the wire.
        is_first = job.begins_run and all(p.piece.job_id != job_id for p in self._packing)
        return job.queue.next(job.num_final_blocks, is_first=is_first)

    def _note_final(self, job: _Job, export: Export, plan: int) -> None:
        """Note the blocks that a plan makes final."""
        job.begins_run |= job.queue.next(job.num_final_blocks, is_first=False) is None
        job.blocks += export.block_ids
        final = job.num_final_blocks
        job.milestones.append(_Milestone(final, plan))
        if final > job.queue.planned:
            num_bytes = (final - job.queue.planned) * self.parts.block_bytes
            # What ends the prompt is divided if it is worth it, and can be.
            is_large = export.is_last and num_bytes > self.divided_bytes
            job.queue.add(final, by_part=is_large and self.moves.marks_parts(plan))

    def _pack(self, job_id: str, job: _Job, number: int, span: Span) -> bool:
        slot = self.staging.try_acquire()
        if slot is None:
            return False
        nbytes = self.parts.packed_bytes(len(span.positions), len(span.parts))
        piece = StagedPiece(job_id, number, span, _random_seed(), slot, nbytes)
        blocks = [job.blocks[position] for position in span.positions]
        try:
            move = self.moves.pack(blocks, span.parts, slot.buffer, piece.seed, job.plan_of(span))
        except BaseException:
            slot.release()
            raise
        self._packing.append(_Packing(piece, job.life, move))
        self._hand_over_packed()  # it must not wait until everything that is final is launched
        return True

    def _hand_over_packed(self) -> None:
        while self.is_due():
            self._hand_over(self._packing.popleft())
        if self._packing:
            self._announce(self._packing[0].piece)

    def _announce(self, piece: StagedPiece) -> None:
        if piece is not self._announced and piece.job_id in self._jobs:
            self._announced = piece
            self.on_packing(piece)

    def _hand_over(self, packing: _Packing) -> None:
        piece = packing.piece
        job = self._jobs.get(piece.job_id)
        was_announced, self._announced = piece is self._announced, None
        if job is None:
            self._drop(piece, was_announced)
        elif job.life != packing.life:
            # The blocks were given away while they were read: what was packed may be another's.
            self._drop(piece, was_announced)
            job.resend.append((piece.piece, piece.span))
        else:
            self.on_packed(piece)

    def _drop(self, piece: StagedPiece, was_announced: bool) -> None:
        piece.slot.release()
        if was_announced:
            self.on_dropped(piece)


def _random_seed() -> int:
    return secrets.randbits(64) - 2**63
