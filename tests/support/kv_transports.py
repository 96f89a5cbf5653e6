"""Transports of one process: one-sided, as CUDA IPC is, and one that fails when a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

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
    Transport,
)
from pagewire.shared.transfer.transports.zmq import ZmqTransport

_stagings: dict[bytes, Staging] = {}  # stagings to which senders may write, by name
_copies: dict[tuple[int, int], Pending] = {}  # the newest by receiver's staging and credit


class LoopbackTransport(Transport):
    """Copies between stagings of this process: after the packing, straight into the receiver's.

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


class HeldBack:
    """Something pending that does not end while it is held."""

    def __init__(self, inner: Pending, is_held: Callable[[], bool]) -> None:
        self.inner, self.is_held = inner, is_held

    def poll(self) -> bool:
        return self.inner.poll() and not self.is_held()


class Failed:
    """Something pending that has failed."""

    def poll(self) -> bool:
        raise TransferError("the wire is cut")


@dataclass
class FaultyTransport:
    """Wraps a transport; a test decides what goes wrong.

    Attributes:
        num_corrupt: number of next payloads in which a bit is flipped.
        loses: whether segments get lost, with their announcements.
        fails: operation that fails once: "offer", "outbound", "inbound", "send", "sent" or
            "receive"; empty for none.
        holds_writes: whether sends do not end, so that their staging slots stay in use.
        holds_payloads: whether announced payloads do not arrive.
        holds_slots: whether something may still write to staging slots of links that have ended.
        num_open: number of halves of links that have not been closed.
        num_sent: number of segments that were to be sent.
    """

    inner: Transport
    staging: Staging
    moves: BlockMoves
    num_corrupt: int = 0
    loses: bool = False
    fails: str = ""
    holds_writes: bool = False
    holds_payloads: bool = False
    holds_slots: bool = False
    num_open: int = 0
    num_sent: int = 0
    name: ClassVar[str] = "faulty"

    def offer(self, link: int) -> bytes:
        self.fail_at("offer")
        return self.inner.offer(link)

    def withdraw(self, link: int) -> None:
        self.inner.withdraw(link)

    def inbound(self, link: int, reply: bytes) -> Inbound:
        self.fail_at("inbound")
        inner = self.inner.inbound(link, reply)
        self.num_open += 1
        return FaultyInbound(self, inner)

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        self.fail_at("outbound")
        inner = self.inner.outbound(link, offer, socket)
        self.num_open += 1
        return FaultyOutbound(self, inner)

    def fds(self) -> list[int]:
        return self.inner.fds()

    def poll(self) -> bool:
        return self.inner.poll()

    def close(self) -> None:
        self.inner.close()

    def fail_at(self, where: str) -> None:
        if self.fails == where:
            self.fails = ""
            raise TransferError("the wire is cut")


@dataclass
class FaultyOutbound:
    transport: FaultyTransport
    inner: Outbound

    @property
    def reply(self) -> bytes:
        return self.inner.reply

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        transport = self.transport
        transport.num_sent += 1
        transport.fail_at("send")
        if transport.loses:
            return DONE
        if transport.num_corrupt:
            transport.num_corrupt -= 1
            byte = transport.staging.buffers[slot][segment.nbytes - 1 :][:1]
            packed = transport.moves.queue(lambda: byte.bitwise_xor_(4))
        sent = self.inner.send(segment, slot, packed)
        if transport.fails == "sent":
            transport.fails = ""
            return Failed()
        return HeldBack(sent, lambda: transport.holds_writes)

    def close(self) -> None:
        self.transport.num_open -= 1
        self.inner.close()


@dataclass
class FaultyInbound:
    transport: FaultyTransport
    inner: Inbound

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        received = self.inner.receive(segment, body)
        if self.transport.fails == "receive":
            self.transport.fails = ""
            return Failed()
        return HeldBack(received, lambda: self.transport.holds_payloads)

    def close(self) -> Pending:
        self.transport.num_open -= 1
        return HeldBack(self.inner.close(), lambda: self.transport.holds_slots)


BY_NAME: dict[str, Callable[[Staging, BlockMoves], Transport]] = {
    "loopback": LoopbackTransport,
    "zmq": ZmqTransport,
}


def open_transports(
    names: tuple[str, ...], staging: Staging, moves: BlockMoves
) -> dict[str, FaultyTransport]:
    """Return transports by name, which work until a test lets them fail."""
    return {name: FaultyTransport(BY_NAME[name](staging, moves), staging, moves) for name in names}
