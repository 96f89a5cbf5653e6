"""Scatters pieces that landed into the blocks reserved for them, between the engine's steps.

Runs in the engine's thread, the one that frees blocks, so that a piece of a request that ended in
the meantime can never touch a block which now belongs to another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from pagewire.shared.engine.model_runner import Executor, PendingChecksums
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
    checksums: PendingChecksums


@dataclass(slots=True)
class PieceScatterer:
    """The step hook of a decode engine.

    Attributes:
        on_scattered: called in the engine's thread, when the slot has been released.
    """

    executor: Executor
    on_scattered: Callable[[str, PieceHeader, PieceFate], None]
    _scattering: deque[_Scattering] = field(default_factory=deque)

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
            slot.release()
            self.on_scattered(request_id, header, PieceFate.UNWANTED)
            return
        try:
            blocks = [sequence.block_ids[position] for position in header.positions]
            checksums = self.executor.unpack(slot.buffer[: header.nbytes], blocks)
        except BaseException:
            slot.release()
            raise
        self._scattering.append(_Scattering(request_id, header, slot, checksums))

    def after_launch(self) -> bool:
        """Check the pieces whose blocks have been moved."""
        while self._scattering and self._scattering[0].checksums.is_done():
            done = self._scattering.popleft()
            done.slot.release()
            intact = done.checksums.values() == done.header.checksums
            fate = PieceFate.SCATTERED if intact else PieceFate.DAMAGED
            self.on_scattered(done.request_id, done.header, fate)
        return bool(self._scattering)
