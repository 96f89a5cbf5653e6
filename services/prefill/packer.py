"""Packs the finished blocks of prefill jobs into staging slots, between the engine's steps.

A block is final once the steps launched so far have written all its tokens; packing is queued on
the device behind those steps and beside later ones, so that a chunk's blocks leave while the next
chunk computes. All of this runs in the engine's thread; what is packed is handed over by a
callback.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire.kernels.kv_staging import max_blocks, packed_bytes
from pagewire.shared.engine.block_mover import Marker, PendingMove
from pagewire.shared.engine.model_runner import Executor
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.transfer.pieces import next_piece_size
from pagewire.shared.transfer.staging import StagingPool, StagingSlot


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """A piece in its staging slot. Whoever gets it owns the slot.

    Attributes:
        positions: block positions in the sequence.
        seed: of the checksums that are packed with the blocks.
    """

    job_id: str
    piece: int
    positions: list[int]
    seed: int
    slot: StagingSlot
    nbytes: int


@dataclass(slots=True)
class _Job:
    """A job in the engine.

    Attributes:
        most_blocks: of a piece.
        milestones: number of final blocks, and the point in the launched work that makes them so.
        num_preemptions: of the sequence when these were noted; it loses all blocks with one.
        begins_run: earlier final blocks had all been packed when the next ones became final.
    """

    sequence: Sequence
    next_block: int
    most_blocks: int
    next_piece: int = 0
    milestones: list[tuple[int, Marker]] = field(default_factory=list)
    num_preemptions: int = 0
    begins_run: bool = False
    resend: deque[tuple[int, list[int]]] = field(default_factory=deque)

    @property
    def num_final_blocks(self) -> int:
        """Blocks that may be packed behind their milestones."""
        return self.milestones[-1][0] if self.milestones else 0

    def marker_of(self, position: int) -> Marker:
        """The point behind which a block is final."""
        return next(marker for final, marker in self.milestones if final > position)


@dataclass(frozen=True, slots=True)
class _Packing:
    piece: PackedPiece
    num_preemptions: int
    move: PendingMove


@dataclass(slots=True)
class PiecePacker:
    """The step hook of a prefill engine.

    Attributes:
        staging: slots of one block or more to pack into; a job waits while none is free.
        on_packed: called in the engine's thread.
    """

    executor: Executor
    staging: StagingPool
    block_size: int
    block_bytes: int
    on_packed: Callable[[PackedPiece], None]
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _packing: deque[_Packing] = field(default_factory=deque)

    def start(
        self, job_id: str, sequence: Sequence, first_block: int, receiver_slot_bytes: int
    ) -> None:
        """Pack a job's blocks from `first_block` on, as they become final.

        Args:
            job_id: names it in pieces.
            sequence: what the engine computes.
            first_block: earlier ones are not wanted.
            receiver_slot_bytes: holds one block or more; a piece fits the slots of both sides.
        """
        slot_bytes = min(self.staging.slot_bytes, receiver_slot_bytes)
        self._jobs[job_id] = _Job(sequence, first_block, max_blocks(slot_bytes, self.block_bytes))

    def send_again(self, job_id: str, piece: int, positions: list[int]) -> None:
        """Pack blocks of a piece that got lost or damaged once more."""
        if job_id in self._jobs:
            self._jobs[job_id].resend.append((piece, positions))

    def drop(self, job_id: str) -> None:
        """Forget a job; its blocks may be freed from now on."""
        self._jobs.pop(job_id, None)

    def after_launch(self) -> bool:
        """Pack what is final as far as there are slots, hand over what has been packed."""
        for job_id, job in self._jobs.items():
            self._note_progress(job)
            self._pack_job(job_id, job)
        self._hand_over_packed()
        return bool(self._packing)

    def _pack_job(self, job_id: str, job: _Job) -> None:
        while job.resend and job.resend[0][1][-1] < job.num_final_blocks:
            piece, positions = job.resend[0]
            if not self._pack(job_id, job, piece, positions):
                return
            job.resend.popleft()
        while (ready := job.num_final_blocks - job.next_block) > 0:
            # A job that waits for slots has none being packed either, but pieces on the wire.
            is_first = job.begins_run and all(p.piece.job_id != job_id for p in self._packing)
            count = next_piece_size(ready, job.most_blocks, is_first=is_first)
            positions = list(range(job.next_block, job.next_block + count))
            if not self._pack(job_id, job, job.next_piece, positions):
                return
            job.begins_run = False
            job.next_piece += 1
            job.next_block = positions[-1] + 1

    def _note_progress(self, job: _Job) -> None:
        """Mark the end of the launched work if it makes further blocks final."""
        if job.num_preemptions != job.sequence.num_preemptions:
            job.num_preemptions = job.sequence.num_preemptions
            job.milestones.clear()
        final = self._num_final_blocks(job.sequence)
        if final > job.num_final_blocks:
            job.begins_run |= job.next_block >= job.num_final_blocks
            job.milestones.append((final, self.executor.mark()))

    def _num_final_blocks(self, sequence: Sequence) -> int:
        """Blocks that launched steps have filled; the last one counts when the prompt ends."""
        computed = sequence.num_computed_tokens
        if computed >= sequence.num_prompt_tokens:
            return -(-sequence.num_prompt_tokens // self.block_size)
        return computed // self.block_size

    def _pack(self, job_id: str, job: _Job, number: int, positions: list[int]) -> bool:
        slot = self.staging.try_acquire()
        if slot is None:
            return False
        nbytes = packed_bytes(len(positions), self.block_bytes)
        piece = PackedPiece(job_id, number, positions, _random_seed(), slot, nbytes)
        blocks = [job.sequence.block_ids[position] for position in positions]
        try:
            move = self.executor.pack(
                blocks, slot.buffer[:nbytes], piece.seed, job.marker_of(positions[-1])
            )
        except BaseException:
            slot.release()
            raise
        self._packing.append(_Packing(piece, job.num_preemptions, move))
        self._hand_over_packed()  # it must not wait until everything that is final is launched
        return True

    def _hand_over_packed(self) -> None:
        while self._packing and self._packing[0].move.is_done():
            self._hand_over(self._packing.popleft())

    def _hand_over(self, packing: _Packing) -> None:
        piece = packing.piece
        job = self._jobs.get(piece.job_id)
        if job is None:
            piece.slot.release()
        elif job.sequence.num_preemptions != packing.num_preemptions:
            # The blocks were given away while they were read: what was packed may be another's.
            piece.slot.release()
            job.resend.append((piece.piece, piece.positions))
        else:
            self.on_packed(piece)


def _random_seed() -> int:
    return secrets.randbits(64) - 2**63
