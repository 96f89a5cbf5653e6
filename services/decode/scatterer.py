"""Scatters pieces that landed into the blocks reserved for them, between the engine's steps.

Runs in the engine's thread, the one that frees blocks, and pins the blocks until it is done, so
that a piece of a request that ended in the meantime can never touch a block which now belongs to
another. Scattering goes on beside the steps: nothing reads a reserved block before it is activated,
and what an old step may still write to one was launched before the reservation. Blocks come whole
or by parts, in any order; what is counted is parts. A sequence whose last part has come is
activated here and now: its next step waits for no other thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from pagewire.shared.engine.block_mover import PendingCheck
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.executor import BlockMoves
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.engine.step import Expect, StepPlan, Withdraw
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.request import RequestStatus
from pagewire.shared.transfer.staging import StagingSlot

# [blocks of a sequence]: which parts of each are there, a bit a part. MAX_PARTS fit.
_Coverage = NDArray[np.uint8]


class PieceFate(Enum):
    """What became of a piece."""

    SCATTERED = auto()
    DAMAGED = auto()
    UNWANTED = auto()


@dataclass(frozen=True, slots=True)
class _Scattering:
    request_id: str
    header: PieceHeader
    slot: StagingSlot
    blocks: list[int]
    check: PendingCheck


@dataclass(frozen=True, slots=True)
class Completion:
    """What a reserved sequence waits for.

    Attributes:
        job_id: the prefill job whose blocks count.
        positions: of the blocks that it computes.
        parts: of each block.
        first_token: what the sequence runs on from.
        on_activated: called in the engine's thread.
    """

    job_id: str
    positions: range
    parts: range
    first_token: int
    on_activated: Callable[[], None]


def _parts_of(header: PieceHeader) -> range:
    return range(header.first_part, header.first_part + header.num_parts)


def _bits(parts: range) -> int:
    """Return what stands for these parts in the coverage of a block."""
    return sum(1 << part for part in parts)


@dataclass(slots=True, eq=False)
class _Reservation:
    """A sequence's reserved blocks.

    Attributes:
        num_blocks: of the sequence.
        after: the last plan whose work may touch them.
        pieces: job and number of those that have landed or are landing.
        landing: what these write, and no later piece has written.
        filled: what is intact, by job; what no later piece has been written to.
        completion: once the first token is known.
    """

    num_blocks: int
    after: int
    pieces: set[tuple[str, int]] = field(default_factory=set)
    landing: dict[tuple[str, int], _Coverage] = field(default_factory=dict)
    filled: dict[str, _Coverage] = field(default_factory=dict)
    completion: Completion | None = None

    def note_written(self, header: PieceHeader) -> None:
        """A piece is being written over what a job given up may have left, and may be damaged."""
        written = np.zeros(self.num_blocks, np.uint8)
        written[header.positions] = _bits(_parts_of(header))
        for earlier in (*self.landing.values(), *self.filled.values()):
            earlier &= ~written
        self.pieces.add((header.job_id, header.piece))
        self.landing[header.job_id, header.piece] = written

    def note_intact(self, header: PieceHeader) -> None:
        """A piece was intact; what it has is there, unless another was written there since."""
        landed = self.landing.pop((header.job_id, header.piece), None)
        if landed is not None:
            filled = self.filled.setdefault(header.job_id, np.zeros_like(landed))
            filled |= landed

    def note_damaged(self, header: PieceHeader) -> None:
        """A piece was damaged; it may come again."""
        self.pieces.discard((header.job_id, header.piece))
        self.landing.pop((header.job_id, header.piece), None)

    def has(self, completion: Completion) -> bool:
        """Whether all is there that a sequence waits for."""
        filled, positions = self.filled.get(completion.job_id), completion.positions
        if filled is None:
            return not positions
        wanted = _bits(completion.parts)
        return bool((filled[positions.start : positions.stop] & wanted == wanted).all())


@dataclass(slots=True)
class PieceScatterer:
    """The step hook of a decode engine.

    Attributes:
        core: its sequences are looked up and activated.
        moves: of its blocks.
        on_scattered: called in the engine's thread, when the slot has been released.
        on_reserved: called there with the first block that is expected and the number of blocks,
            when pieces for a sequence may come.
    """

    core: EngineCore
    moves: BlockMoves
    on_scattered: Callable[[str, PieceHeader, PieceFate], None]
    on_reserved: Callable[[str, int, int], None] = lambda _request_id, _first, _count: None
    _reservations: dict[str, _Reservation] = field(default_factory=dict)
    _scattering: deque[_Scattering] = field(default_factory=deque)

    def complete(self, request_id: str, completion: Completion) -> None:
        """Activate a sequence as soon as its blocks are there; one that has ended needs none."""
        reservation = self._reservations.get(request_id)
        if reservation is not None:
            reservation.completion = completion
            self._activate_if_complete(request_id, reservation)

    def scatter(self, request_id: str, header: PieceHeader, slot: StagingSlot) -> None:
        """Launch the scattering of a piece; takes over the slot.

        Args:
            request_id: whose piece this is.
            header: its positions name entries of the sequence's block table.
            slot: holds the payload.
        """
        sequence = self._reserved(request_id)
        if sequence is None:
            self._refuse(request_id, header, slot)
            return
        reservation = self._reservations[request_id]
        piece = (header.job_id, header.piece)
        if piece in reservation.pieces:  # a second copy, damaged perhaps, must not spoil the first
            self._refuse(request_id, header, slot)
            return
        try:
            blocks = [sequence.block_ids[position] for position in header.positions]
            check = self.moves.unpack(
                slot.buffer, blocks, _parts_of(header), header.seed, reservation.after
            )
        except BaseException:
            slot.release()
            raise
        reservation.note_written(header)
        self.core.scheduler.pin(blocks)
        self._scattering.append(_Scattering(request_id, header, slot, blocks, check))

    def after_launch(self, plan: StepPlan | None) -> bool:
        """Take note of new reservations; check the pieces whose blocks have been moved."""
        for work in plan.kv if plan is not None else ():
            if isinstance(work, Withdraw):
                self._reservations.pop(work.request_id, None)
            elif isinstance(work, Expect) and plan is not None:
                num_blocks = len(work.block_ids)
                made = _Reservation(num_blocks, after=plan.number - 1)
                self._reservations[work.request_id] = made
                self.on_reserved(work.request_id, work.first, num_blocks)
        while self.is_due():
            done = self._scattering.popleft()
            intact = done.check.is_intact()  # the slot's next move tells it in the same place
            done.slot.release()
            self.core.unpin(done.blocks)
            fate = PieceFate.SCATTERED if intact else PieceFate.DAMAGED
            self.on_scattered(done.request_id, done.header, fate)
            reservation = self._reservations.get(done.request_id)
            if reservation is not None:
                self._note_fate(done, reservation, fate)
        return bool(self._scattering)

    def is_due(self) -> bool:
        """Whether blocks have been moved."""
        return bool(self._scattering) and self._scattering[0].check.is_done()

    def _note_fate(self, done: _Scattering, reservation: _Reservation, fate: PieceFate) -> None:
        header = done.header
        if fate is PieceFate.DAMAGED:
            reservation.note_damaged(header)
            return
        reservation.note_intact(header)
        self._activate_if_complete(done.request_id, reservation)

    def _activate_if_complete(self, request_id: str, reservation: _Reservation) -> None:
        sequence = self._reserved(request_id)
        completion = reservation.completion
        if sequence is None or completion is None or not reservation.has(completion):
            return
        del self._reservations[request_id]
        self.core.activate(sequence, completion.first_token)
        completion.on_activated()

    def _reserved(self, request_id: str) -> Sequence | None:
        """The sequence, if it still waits for its blocks."""
        sequence = self.core.get(request_id)
        if sequence is None or sequence.status is not RequestStatus.RESERVED:
            return None
        return sequence

    def _refuse(self, request_id: str, header: PieceHeader, slot: StagingSlot) -> None:
        slot.release()
        self.on_scattered(request_id, header, PieceFate.UNWANTED)
