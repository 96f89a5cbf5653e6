"""Payloads within one process: a one-sided carrier for tests.

A sender's copy is queued after its packing, straight into the receiver's staging, as by CUDA IPC.
"""

from __future__ import annotations

from typing import ClassVar

import zmq

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.transfer.carriers.base import (
    DONE,
    Carrier,
    Inbound,
    LinkSocket,
    Outbound,
    Pending,
)
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.staging import Staging

_stagings: dict[bytes, Staging] = {}  # stagings to which senders may write, by name
_copies: dict[tuple[int, int], Pending] = {}  # the newest by receiver's staging and credit


class LoopbackCarrier(Carrier):
    """Copies between stagings of this process.

    Args:
        staging: of this worker.
        moves: queues work on its device.
    """

    name: ClassVar[str] = "loopback"

    def __init__(self, staging: Staging, moves: BlockMoves) -> None:
        self._staging, self._moves = staging, moves

    def offer(self, link: int) -> bytes:
        """Return the name of this worker's staging."""
        name = str(id(self._staging)).encode()
        _stagings[name] = self._staging
        return name

    def inbound(self, link: int, reply: bytes) -> Inbound:
        """Return the receiver's half of a link."""
        return _LoopbackInbound(self._staging)

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link.

        Raises:
            TransferError: the receiver is in another process.
        """
        if offer not in _stagings:
            raise TransferError("the receiver is in another process")
        return _LoopbackOutbound(self._staging, _stagings[offer], self._moves, socket)

    def close(self) -> None:
        """Keep further senders from writing to this worker's staging."""
        _stagings.pop(str(id(self._staging)).encode(), None)


class _LoopbackOutbound(Outbound):
    def __init__(
        self, source: Staging, target: Staging, moves: BlockMoves, socket: LinkSocket
    ) -> None:
        self._source, self._target, self._moves, self._socket = source, target, moves, socket

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        """Queue a payload's copy into the receiver's staging slot, and announce it."""
        source, target = self._source.buffers[slot], self._target.buffers[segment.credit]
        nbytes = segment.nbytes
        copy = self._moves.queue(lambda: target[:nbytes].copy_(source[:nbytes], non_blocking=True))
        _copies[id(self._target), segment.credit] = copy
        self._socket.post(segment)
        return copy


class _LoopbackInbound(Inbound):
    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        """Return the payload's copy."""
        return _copies.get((id(self._staging), segment.credit), DONE)
