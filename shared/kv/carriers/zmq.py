"""Payloads over the link's own ZeroMQ socket, in one message with their announcement.

It works everywhere: through host memory, encrypted with the cluster's keys. Payloads in host memory
are sent without a copy; payloads on a GPU are copied to page-locked memory first.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import zmq

from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.errors import TransferError
from pagewire.shared.kv.carriers.base import (
    DONE,
    Carrier,
    Inbound,
    LinkSocket,
    Outbound,
    Pending,
    Then,
)
from pagewire.shared.kv.messages import Segment
from pagewire.shared.kv.staging import Staging


class ZmqCarrier(Carrier):
    """The carrier that works if no other does.

    Args:
        staging: this worker's staging slots.
        moves: queues work on the device.
    """

    name: ClassVar[str] = "zmq"

    def __init__(self, staging: Staging, moves: BlockMoves) -> None:
        self._staging, self._moves = staging, moves
        self._pinned: torch.Tensor | None = None

    def offer(self, link: int) -> bytes:
        """Return nothing: a sender needs no more than the link's socket."""
        return b""

    def inbound(self, link: int, reply: bytes) -> Inbound:
        """Return the receiver's half of a link."""
        return _ZmqInbound(self._staging, self._host_buffers(), self._moves)

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link."""
        return _ZmqOutbound(self._staging, self._host_buffers(), self._moves, socket)

    def _host_buffers(self) -> list[torch.Tensor]:
        """Return buffers in host memory for the staging slots."""
        if not self._staging.memory.is_cuda:
            return self._staging.buffers
        if self._pinned is None:
            shape = self._staging.memory.shape
            self._pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return list(self._pinned[:, : self._staging.slot_bytes])

    def close(self) -> None:
        """Free the page-locked memory."""
        self._pinned = None


class _ZmqOutbound(Outbound):
    def __init__(
        self, staging: Staging, host: list[torch.Tensor], moves: BlockMoves, socket: LinkSocket
    ) -> None:
        self._staging, self._host, self._moves, self._socket = staging, host, moves, socket

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        """Copy a payload from the GPU to the host; then send the announcement with it."""
        sides = self._staging.buffers, self._host
        source, target = (buffers[slot][: segment.nbytes] for buffers in sides)
        if source.is_cuda:
            packed = self._moves.queue(lambda: target.copy_(source, non_blocking=True))
        return Then(packed, partial(self._socket.post, segment, target.numpy().data))


class _ZmqInbound(Inbound):
    def __init__(self, staging: Staging, host: list[torch.Tensor], moves: BlockMoves) -> None:
        self._staging, self._host, self._moves = staging, host, moves

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        """Copy the payload into its staging slot."""
        if body is None or len(body) != segment.nbytes:
            size = 0 if body is None else len(body)
            raise TransferError(f"a payload of {size} bytes, announced as {segment.nbytes}")
        host = self._host[segment.credit][: segment.nbytes]
        host.copy_(torch.frombuffer(body.buffer, dtype=torch.uint8))
        target = self._staging.buffers[segment.credit]
        if target.is_cuda:
            self._moves.queue(lambda: target[: segment.nbytes].copy_(host, non_blocking=True))
        return DONE
