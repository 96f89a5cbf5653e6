"""An in-memory transport for tests, which loses, delays, doubles and corrupts on demand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from pagewire.shared.errors import TransferError
from pagewire.shared.transfer.peer import Landing, Peer
from pagewire.shared.transfer.session import SessionTransport
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.transfer.wire import SessionMessage, encode_message


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a payload on its way.

    Attributes:
        drop: it never arrives, though its sender is told that it left.
        delay_s: it arrives this much later.
        copies: how often it arrives.
        corrupt_byte: index of a byte that is flipped.
    """

    drop: bool = False
    delay_s: float = 0.0
    copies: int = 1
    corrupt_byte: int | None = None


@dataclass(eq=False, slots=True)
class LoopbackHub:
    """Connects the loopback transports of one event loop.

    Attributes:
        faults: what happens to the n-th payload, counted from 0 over all transports.
        num_payloads: how many have left so far.
    """

    faults: dict[int, Fault] = field(default_factory=dict)
    num_payloads: int = 0
    _transports: dict[bytes, LoopbackTransport] = field(default_factory=dict)

    def add(self, transport: LoopbackTransport) -> bytes:
        """Make a transport reachable; returns its endpoint."""
        endpoint = f"loopback-{id(transport)}".encode()
        self._transports[endpoint] = transport
        return endpoint

    def remove(self, transport: LoopbackTransport) -> None:
        """Make it unreachable, as if its process had died."""
        self._transports = {k: v for k, v in self._transports.items() if v is not transport}

    def find(self, endpoint: bytes) -> LoopbackTransport | None:
        """Return the transport that is reachable there."""
        return self._transports.get(endpoint)

    def next_fault(self) -> Fault:
        """Count a payload and return what happens to it."""
        fault = self.faults.get(self.num_payloads, Fault())
        self.num_payloads += 1
        return fault


@dataclass(eq=False, slots=True)
class _Link:
    """The way to one peer."""

    closed: asyncio.Event = field(default_factory=asyncio.Event)
    pushes: set[asyncio.Future[None]] = field(default_factory=set)


class LoopbackTransport(SessionTransport):
    """Pieces within one event loop.

    Args:
        hub: shared by all transports that shall reach each other.
    """

    name: ClassVar[str] = "loopback"

    def __init__(self, worker_id: str, staging: StagingPool, hub: LoopbackHub) -> None:
        super().__init__(worker_id, staging)
        self._hub = hub
        self._links: dict[Peer, _Link] = {}

    async def _open(self) -> bytes:
        return self._hub.add(self)

    async def _link(self, peer: Peer) -> None:
        if self._hub.find(peer.address.endpoint) is None:
            raise TransferError(f"nobody is at {peer.address.endpoint!r}")
        self._links[peer] = _Link()

    async def _unlink(self, peer: Peer) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.closed.set()
            if link.pushes:
                await asyncio.wait(link.pushes)

    def _post(self, peer: Peer, message: SessionMessage) -> None:
        target = self._hub.find(peer.address.endpoint)
        loop = asyncio.get_running_loop()
        if target is None:
            loop.call_soon(self._break, peer, "nobody is there any more")
        elif peer in self._links:
            loop.call_soon(target._on_message, encode_message(message))

    def _push(self, peer: Peer, seq: int, payload: torch.Tensor) -> asyncio.Future[None]:
        return asyncio.create_task(self._carry(peer, seq, payload))

    async def _carry(self, peer: Peer, seq: int, payload: torch.Tensor) -> None:
        link = self._links.get(peer)
        if link is None:
            raise TransferError(f"there is no way to {peer.peer_id!r}")
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        link.pushes.add(ended)
        try:
            fault = self._hub.next_fault()
            await self._delay(link, fault.delay_s)
            target = self._hub.find(peer.address.endpoint)
            if target is None:
                raise TransferError(f"{peer.peer_id!r} is not there any more")
            if not fault.drop:
                for _ in range(fault.copies):
                    target._take_payload(peer.out, seq, _damaged(payload, fault))
        finally:
            link.pushes.discard(ended)
            ended.set_result(None)

    async def _close_carrier(self) -> None:
        self._hub.remove(self)

    async def _delay(self, link: _Link, delay_s: float) -> None:
        if delay_s:
            try:
                await asyncio.wait_for(link.closed.wait(), delay_s)
            except TimeoutError:
                return
            raise TransferError("the way to the peer was given up")

    def _take_payload(self, channel: int, seq: int, payload: torch.Tensor) -> None:
        claimed = self._claim(channel, seq, payload.nbytes)
        if claimed is not None:
            peer, landing = claimed
            self._arrivals.land(peer, landing, _fill(landing, payload))


async def _fill(landing: Landing, payload: torch.Tensor) -> None:
    landing.slot.buffer[: payload.nbytes].copy_(payload)


def _damaged(payload: torch.Tensor, fault: Fault) -> torch.Tensor:
    payload = payload.clone()  # the sender may overwrite its own from now on
    if fault.corrupt_byte is not None:
        payload[fault.corrupt_byte] ^= 0xFF
    return payload
