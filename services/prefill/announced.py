"""A piece that is offered while it is still being packed."""

from __future__ import annotations

import asyncio

from pagewire.services.prefill.packer import StagedPiece
from pagewire.shared.errors import TransferError


class Announced:
    """A piece that is being packed: who is to send it waits here.

    Attributes:
        sender: waits here. If it has ended before the piece is packed, that is sent as any other.
    """

    def __init__(self, piece: StagedPiece) -> None:
        self.piece = piece
        self.sender: asyncio.Task[None] | None = None
        self._packed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_left(self) -> bool:
        """Whether nobody waits any more."""
        return self.sender is None or self.sender.done()

    @property
    def is_packed(self) -> bool:
        """Whether it has been handed over."""
        return self._packed.done() and self._packed.result()

    def resolve(self, *, packed: bool) -> None:
        """It has been handed over, or never will be."""
        self._packed.set_result(packed)

    async def until_packed(self) -> None:
        """Wait until it is packed.

        Raises:
            TransferError: it will not be.
        """
        # To give up waiting must not cancel it: it is resolved later.
        if not await asyncio.shield(self._packed):
            raise TransferError("the piece was dropped")
