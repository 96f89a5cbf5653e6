"""KV transports of any kind for tests, opened and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from pagewire.shared.channel_auth import ClusterKeys
from pagewire.shared.transfer.base import ReceivedPiece
from pagewire.shared.transfer.loopback import LoopbackHub, LoopbackTransport
from pagewire.shared.transfer.session import SessionTransport
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.transfer.ucx import UcxTransport
from pagewire.shared.transfer.zmq import ZmqTransport
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.transfer_child import piece_bytes, piece_header

HOLDING = "-holding"  # with slots that are held for peers ahead of their pieces
KINDS = ["loopback", "zmq", "zmq-curve", "ucx"] + [
    kind + HOLDING for kind in ("loopback", "zmq", "ucx")
]
KEYS = ClusterKeys.derive("the cluster's secret")
PATIENCE_S = 10.0  # for what must succeed


@dataclass(eq=False)
class Node:
    """One transport with a pool of its own for incoming pieces."""

    transport: SessionTransport
    staging: StagingPool
    address: bytes = b""

    @property
    def num_free(self) -> int:
        """Slots in which no piece is or is awaited; some may be held for peers."""
        return self.staging.num_free + self.transport.num_held

    async def send(
        self, peer: str, piece: int, nbytes: int, timeout: float = PATIENCE_S
    ) -> torch.Tensor:
        """Send a piece; its bytes are overwritten as soon as `send` is done, then returned."""
        payload = piece_bytes(piece, nbytes)
        try:
            await self.transport.send(peer, piece_header(piece, nbytes), payload, timeout)
        finally:
            payload.fill_(0)
        return payload

    async def take(self, timeout: float = PATIENCE_S) -> ReceivedPiece:
        """Return the next piece, checked; the caller releases its slot."""
        async with asyncio.timeout(timeout):
            piece = await self.transport.recv()
        nbytes = piece.header.nbytes
        assert piece.header == piece_header(piece.header.piece, nbytes)
        expected = piece_bytes(piece.header.piece, nbytes)
        assert torch.equal(piece.slot.buffer[:nbytes].cpu(), expected)
        return piece

    async def take_all(self, count: int) -> list[int]:
        """Take pieces, give their slots back, return their numbers in the order of arrival."""
        numbers = []
        for _ in range(count):
            piece = await self.take()
            numbers.append(piece.header.piece)
            piece.slot.release()
        return numbers


@dataclass(eq=False)
class Network:
    """Opens transports of one kind."""

    kind: str
    hub: LoopbackHub = field(default_factory=LoopbackHub)
    nodes: list[Node] = field(default_factory=list)

    def create(self, name: str, staging: StagingPool) -> SessionTransport:
        match self.kind.removesuffix(HOLDING):
            case "loopback":
                return LoopbackTransport(name, staging, self.hub)
            case "zmq":
                return ZmqTransport(name, staging)
            case "zmq-curve":
                return ZmqTransport(name, staging, keys=KEYS)
            case _:
                return UcxTransport(name, staging)

    async def open(
        self, name: str, num_slots: int = 4, slot_bytes: int = 1 << 16, device: str = "cpu"
    ) -> Node:
        staging = StagingPool(num_slots, slot_bytes, torch.device(device))
        node = Node(self.create(name, staging), staging)
        if self.kind.endswith(HOLDING):
            node.transport.hold_slots(2)
        self.nodes.append(node)
        node.address = await node.transport.start(PATIENCE_S)
        return node

    async def pair(self, num_slots: int = 4, slot_bytes: int = 1 << 16) -> tuple[Node, Node]:
        """Return two nodes that know each other as "a" and "b"."""
        a = await self.open("a", num_slots, slot_bytes)
        b = await self.open("b", num_slots, slot_bytes)
        await a.transport.connect("b", b.address, PATIENCE_S)
        await b.transport.connect("a", a.address, PATIENCE_S)
        return a, b


@asynccontextmanager
async def network(kind: str) -> AsyncIterator[Network]:
    """Close all transports at the end; then no slot may be held."""
    net = Network(kind)
    try:
        yield net
    finally:
        for node in net.nodes:
            await node.transport.close()
    for node in net.nodes:
        node.staging.check_integrity(all_free=True)
        assert not node.staging._watchers


@asynccontextmanager
async def crediting(
    kind: str, num_slots: int = 8, slot_bytes: int = 1 << 16
) -> AsyncIterator[tuple[Node, Node]]:
    """A sender with two credits, and their receiver."""
    async with network(kind) as net:
        a, b = await net.pair(num_slots, slot_bytes)
        b.transport.hold_slots(2)
        await asyncio.gather(a.send("b", 0, 1000), b.take_all(1))
        await credits_of(a, 2)
        yield a, b


async def credits_of(sender: Node, count: int) -> None:
    peer = sender.transport._peers["b"]
    await eventually(lambda: peer.credits == count)
