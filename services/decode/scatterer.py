"""Scatters pieces that landed into the blocks reserved for them, between the engine's steps.

Runs in the engine's thread, the one that frees blocks, and pins the blocks until it is done, so
that a piece of a request that ended in the meantime can never touch a block which now belongs to
another. Scattering goes on beside the steps: nothing reads a reserved block before it is activated,
and what an old step may still write to one was launched before the reservation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from pagewire.shared.engine.model_runner import Executor, Marker, PendingCheck
from pagewire.shared.engine.scheduler import Scheduler
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.request import RequestStatus
from pagewire.shared.transfer.staging import StagingSlot


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
class _Reservation:
    """A sequence's reserved blocks.

    Attributes:
        made: the point behind which nothing that was launched writes to them.
        pieces: job and number of those that have landed or are landing.
    """

    made: Marker
    pieces: set[tuple[str, int]] = field(default_factory=set)


@dataclass(slots=True)
class PieceScatterer:
    """The step hook of a decode engine.

    Attributes:
        on_scattered: called in the engine's thread, when the slot has been released.
    """

    executor: Executor
    scheduler: Scheduler
    on_scattered: Callable[[str, PieceHeader, PieceFate], None]
    _reservations: dict[str, _Reservation] = field(default_factory=dict)
    _scattering: deque[_Scattering] = field(default_factory=deque)

    def reserve(self, request_id: str) -> None:
        """Note when a request's blocks were reserved; call it as they are."""
        for ended in self._reservations.keys() - self.scheduler.reserved.keys():
            del self._reservations[ended]
        self._reservations[request_id] = _Reservation(self.executor.mark())

    def scatter(
        self, request_id: str, sequence: Sequence | None, header: PieceHeader, slot: StagingSlot
    ) -> None:
        """Launch the scattering of a piece; takes over the slot.

        Args:
            request_id: whose piece this is.
            sequence: as the engine knows it now, None if it has ended.
            header: its positions name entries of the sequence's block table.
            slot: holds the payload.
        """
        if sequence is None or sequence.status is not RequestStatus.RESERVED:
            self._refuse(request_id, header, slot)
            return
        reservation = self._reservations[request_id]
        piece = (header.job_id, header.piece)
        if piece in reservation.pieces:  # a second copy, damaged perhaps, must not spoil the first
            self._refuse(request_id, header, slot)
            return
        try:
            blocks = [sequence.block_ids[position] for position in header.positions]
            check = self.executor.unpack(
                slot.buffer[: header.nbytes], blocks, header.seed, reservation.made
            )
        except BaseException:
            slot.release()
            raise
        reservation.pieces.add(piece)
        self.scheduler.pin(blocks)
        self._scattering.append(_Scattering(request_id, header, slot, blocks, check))

    def after_launch(self) -> bool:
        """Check the pieces whose blocks have been moved."""
        while self._scattering and self._scattering[0].check.is_done():
            done = self._scattering.popleft()
            fate = self._fate_of(done)  # the sums may lie in the slot
            done.slot.release()
            self.scheduler.unpin(done.blocks)
            self.on_scattered(done.request_id, done.header, fate)
        return bool(self._scattering)

    def _fate_of(self, done: _Scattering) -> PieceFate:
        header = done.header
        if done.check.is_intact():
            return PieceFate.SCATTERED
        if (reservation := self._reservations.get(done.request_id)) is not None:
            reservation.pieces.discard((header.job_id, header.piece))  # it may come again
        return PieceFate.DAMAGED

    def _refuse(self, request_id: str, header: PieceHeader, slot: StagingSlot) -> None:
        slot.release()
        self.on_scattered(request_id, header, PieceFate.UNWANTED)
