"""Payloads over a ZeroMQ connection of the link, in one message with their announcement.

It works everywhere: through host memory, encrypted with the cluster's keys. Payloads in host memory
are sent without a copy; payloads on a GPU are copied to page-locked memory first.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import zmq

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.engine.execution.executor import BlockMoves
from pagewire.shared.transfer.messages import Segment
from pagewire.shared.transfer.staging import Staging
from pagewire.shared.transfer.transports.base import (
    DONE,
    Inbound,
    LinkSocket,
    Outbound,
    Pending,
    Then,
    Transport,
)


class ZmqTransport(Transport):
    """The transport that works if no other does.

    Args:
        staging: this worker's staging slots.
        moves: queues work on the device.
    """

    name: ClassVar[str] = "zmq"

    def __init__(self, staging: Staging, moves: BlockMoves) -> None:
        self.staging, self.moves = staging, moves
        self._pinned: dict[int, torch.Tensor] = {}  # by staging slot

    def offer(self, link: int) -> bytes:
        """Return nothing: a sender needs no more than the link's socket."""
        return b""

    def inbound(self, link: int, reply: bytes) -> Inbound:
        """Return the receiver's half of a link."""
        return _ZmqInbound(self)

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link."""
        return _ZmqOutbound(self, socket)

    def host_buffer(self, index: int) -> torch.Tensor:
        """Return a staging slot's memory on the host: itself, or page-locked memory.

        This is allocated at its first use, which takes tens of milliseconds: most workers with a
        GPU never use this transport.

        Raises:
            TransferError: the host has no memory left.
        """
        buffer: torch.Tensor = self.staging.buffers[index]
        if not buffer.is_cuda:
            return buffer
        if index not in self._pinned:
            try:
                self._pinned[index] = torch.empty(len(buffer), dtype=torch.uint8, pin_memory=True)
            except RuntimeError as exc:
                raise TransferError(f"no page-locked memory for a payload: {exc}") from exc
        return self._pinned[index]

    def close(self) -> None:
        """Free the page-locked memory of all staging slots."""
        self._pinned.clear()


class _ZmqOutbound(Outbound):
    def __init__(self, transport: ZmqTransport, socket: LinkSocket) -> None:
        self._transport, self._socket = transport, socket

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        """Copy a payload from the GPU to the host; then send the announcement with it."""
        source = self._transport.staging.buffers[slot][: segment.nbytes]
        target = self._transport.host_buffer(slot)[: segment.nbytes]
        if source.is_cuda:
            packed = self._transport.moves.queue(lambda: target.copy_(source, non_blocking=True))
        return Then(packed, partial(self._socket.post, segment, target.numpy().data))


class _ZmqInbound(Inbound):
    def __init__(self, transport: ZmqTransport) -> None:
        self._transport = transport

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        """Copy the payload into its staging slot."""
        if body is None or len(body) != segment.nbytes:
            size = 0 if body is None else len(body)
            raise TransferError(f"a payload of {size} bytes, announced as {segment.nbytes}")
        host = self._transport.host_buffer(segment.credit)[: segment.nbytes]
        host.copy_(torch.frombuffer(body.buffer, dtype=torch.uint8))
        target = self._transport.staging.buffers[segment.credit][: segment.nbytes]
        if target.is_cuda:
            copy = self._transport.moves.queue(lambda: target.copy_(host, non_blocking=True))
            # On one device the unpacking is queued after the copy.
            return DONE if copy.is_of_one_device else copy
        return DONE
