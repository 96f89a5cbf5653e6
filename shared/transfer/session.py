"""What all transports have in common: payloads move only into slots that wait for them.

    sender                                   receiver
      | --Offer(header)--------------------->  | in line for a staging slot
      |                                        | takes a slot
      | <--------------------Grant-----------  |
      | ==payload===========================>  | into the slot, then out of `recv`

So a receiver without a free slot costs nobody any memory, and a sender that loses patience in line
takes back its `Offer` without harm to the connection: no carrier can recall a payload that it has
begun to send. Both sides say `Hello` when they connect, and nothing is offered before both have.
A connection whose payload stalls is broken off and made anew; what was under way fails.

A carrier (ucx, zmq, loopback) is a subclass: it moves session messages and payloads. All of it
runs in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from abc import abstractmethod
from collections import OrderedDict

import torch

from pagewire.shared.errors import ProtocolError, TransferError, TransferTimeoutError
from pagewire.shared.protocol import PieceHeader, decode_header, encode_header
from pagewire.shared.transfer.arrivals import Arrivals, SessionStats
from pagewire.shared.transfer.base import KvTransport, ReceivedPiece
from pagewire.shared.transfer.peer import Landing, Offered, Peer
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.transfer.waiting import uninterrupted, until
from pagewire.shared.transfer.wire import (
    CHANNEL_BITS,
    NONCE_BYTES,
    SEQ_BITS,
    Bye,
    Grant,
    Hello,
    Offer,
    Refusal,
    SessionMessage,
    Withdrawal,
    decode_address,
    decode_message,
    encode_address,
)

logger = logging.getLogger(__name__)

_MAX_OFFERS = 1024  # of one peer in line; more are refused
_MAX_STRANGERS = 256  # peers that said hello before we connected to them
_RELINK_TIMEOUT_S = 5.0
_ARRIVAL_GRACE_S = 0.5  # for payloads in motion when their sender is disconnected


class SessionTransport(KvTransport):
    """A transport by offer and grant, over a carrier that a subclass provides.

    Attributes:
        stats: what went wrong so far.
    """

    def __init__(self, worker_id: str, staging: StagingPool) -> None:
        super().__init__(worker_id, staging)
        self.stats = SessionStats()
        self._nonce = b""
        self._seq = secrets.randbits(SEQ_BITS)
        self._peers: dict[str, Peer] = {}
        self._by_channel: dict[int, Peer] = {}
        self._strangers: OrderedDict[bytes, int] = OrderedDict()
        self._arrivals = Arrivals(staging, self.stats, self._post)
        self._teardowns: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    @abstractmethod
    async def _open(self) -> bytes:
        """Open for peers; return the endpoint that they link to."""

    @abstractmethod
    async def _link(self, peer: Peer) -> None:
        """Make a way to `peer.address.endpoint`; leave nothing behind on failure.

        Raises:
            TransferError: there is no way.
        """

    @abstractmethod
    async def _unlink(self, peer: Peer) -> None:
        """Give up the way to a peer, if there is one, promptly, whatever the peer's state.

        Before this returns, pushes to it have ended and nothing is written for it into a slot.
        May be called again at any time, also while a call is under way or after a cancelled one.
        """

    @abstractmethod
    def _post(self, peer: Peer, message: SessionMessage) -> None:
        """Send a session message, in order, without waiting; calls `_break` if that fails."""

    @abstractmethod
    async def _push(self, peer: Peer, seq: int, payload: torch.Tensor) -> None:
        """Send a granted payload; ends when its memory is no longer needed.

        Raises:
            TransferError: the way is broken or was given up.
        """

    @abstractmethod
    async def _close_carrier(self) -> None:
        """Free everything that `_open` made; all peers are unlinked. Safe if nothing was opened."""

    async def start(self, timeout: float) -> bytes:
        """Open for peers; return the address that a peer passes to `connect`."""
        if self._nonce or self._closing is not None:
            raise TransferError("a transport is started once")
        self._nonce = os.urandom(NONCE_BYTES)
        deadline = asyncio.get_running_loop().time() + timeout
        async with until(deadline, "the transport did not open"):
            endpoint = await self._open()
        return encode_address(self.name, self._nonce, endpoint)

    async def connect(self, peer_id: str, address: bytes, timeout: float) -> None:
        """Make a peer reachable, and accept pieces from it once it has connected as well."""
        peer = Peer(peer_id, decode_address(address, self.name))
        if peer.address.nonce == self._nonce:
            raise TransferError(f"the address given for {peer_id!r} is this transport's own")
        deadline = asyncio.get_running_loop().time() + timeout
        await self.disconnect(peer_id)
        self._check_open()
        try:
            async with until(deadline, f"{peer_id!r} did not answer"):
                await self._link(peer)
            while peer_id in self._peers:  # connected twice at the same time: the last one counts
                await self.disconnect(peer_id)
            self._check_open()
            self._admit(peer)
        finally:
            if self._peers.get(peer_id) is not peer:
                await uninterrupted(self._unlink(peer))

    async def send(
        self, peer_id: str, header: PieceHeader, payload: torch.Tensor, timeout: float
    ) -> None:
        """Send one piece; on return, whatever the outcome, the payload may be overwritten."""
        if not 0 < header.nbytes == payload.nbytes or payload.dtype != torch.uint8:
            raise TransferError(
                f"the header says {header.nbytes} bytes, the payload is {payload.nbytes} bytes "
                f"of {payload.dtype}"
            )
        peer = self._peers.get(peer_id)
        if peer is None:
            raise TransferError(f"there is no peer {peer_id!r}")
        deadline = asyncio.get_running_loop().time() + timeout
        seq = await self._obtain_grant(peer, header, deadline)
        await self._transmit(peer, seq, payload, deadline)

    async def recv(self) -> ReceivedPiece:
        """Return the next piece of any peer; waits without bound."""
        return await self._arrivals.next()

    async def disconnect(self, peer_id: str) -> None:
        """Forget a peer: its sends fail, its pieces that nobody has taken are dropped."""
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        teardown = asyncio.create_task(self._tear_down(peer))
        self._teardowns.add(teardown)
        teardown.add_done_callback(self._teardowns.discard)
        await asyncio.shield(teardown)

    async def close(self) -> None:
        """Disconnect all peers and free everything. Safe to call twice."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        for peer_id in list(self._peers):
            await self.disconnect(peer_id)
        if self._teardowns:  # of callers who were cancelled
            await asyncio.wait(self._teardowns)
        await self._close_carrier()

    def _check_open(self) -> None:
        if self._closing is not None or not self._nonce:
            raise TransferError("the transport is not open")

    def _admit(self, peer: Peer) -> None:
        """Begin to deal with a peer to which there is a way."""
        self._peers[peer.peer_id] = peer
        self._number(peer)
        peer.granter = asyncio.create_task(self._arrivals.grant_offers(peer))
        early = self._strangers.pop(peer.address.nonce, None)
        if early is not None:
            peer.settle(early)
        self._greet(peer, wants_reply=True)

    def _greet(self, peer: Peer, *, wants_reply: bool) -> None:
        self._post(peer, Hello(self._nonce, peer.address.nonce, peer.channel, wants_reply))

    async def _tear_down(self, peer: Peer) -> None:
        """End everything that belongs to a peer that is no longer in `_peers`."""
        if peer.connected:
            self._post(peer, Bye(peer.out))
        self._by_channel.pop(peer.channel, None)
        gone = TransferError(f"{peer.peer_id!r} was disconnected")
        peer.fail(gone)
        peer.reset(gone)
        workers = {task for task in (peer.granter, peer.repair) if task is not None}
        for task in workers:
            task.cancel()
        await asyncio.wait(workers)
        if peer.arriving:  # ends in a moment, unless the peer is dead
            await asyncio.wait(peer.arriving, timeout=_ARRIVAL_GRACE_S)
        await self._unlink(peer)
        if peer.arriving:
            await asyncio.wait(peer.arriving)
        self._arrivals.drop(peer)

    def _break(self, peer: Peer, reason: str) -> None:
        """Drop what is under way with a peer and make the way to it anew."""
        if self._peers.get(peer.peer_id) is not peer or peer.repair or peer.error:
            return
        if peer.left:
            peer.fail(TransferError(f"{peer.peer_id!r} has disconnected"))
            return
        self.stats.broken += 1
        logger.warning("KV connection to %r broken off: %s", peer.peer_id, reason)
        peer.reset(TransferError(f"the connection to {peer.peer_id!r} broke: {reason}"))
        del self._by_channel[peer.channel]
        peer.channel = 0
        self._number(peer)  # anew, which tells the peer that we have forgotten all
        peer.repair = asyncio.create_task(self._repair(peer))

    def _follow(self, peer: Peer, remote_channel: int) -> None:
        """Do what `_break` does for a peer that has broken the connection, or come back, itself."""
        peer.error = None
        peer.reset(TransferError(f"{peer.peer_id!r} has connected anew"))
        peer.remote_channel = remote_channel
        peer.repair = asyncio.create_task(self._repair(peer))

    def _number(self, peer: Peer) -> None:
        """Choose what the peer puts on its messages to us."""
        while not peer.channel or peer.channel in self._by_channel:
            peer.channel = secrets.randbits(CHANNEL_BITS)
        self._by_channel[peer.channel] = peer

    async def _repair(self, peer: Peer) -> None:
        try:
            await self._unlink(peer)
            deadline = asyncio.get_running_loop().time() + _RELINK_TIMEOUT_S
            async with until(deadline, f"{peer.peer_id!r} did not answer"):
                await self._link(peer)
        except TransferError as exc:
            logger.warning("no way to %r any more: %s", peer.peer_id, exc)
            peer.fail(exc)
            return
        finally:
            peer.repair = None
        if peer.remote_channel is not None:
            peer.settle(peer.remote_channel)
        self._greet(peer, wants_reply=True)

    async def _obtain_grant(self, peer: Peer, header: PieceHeader, deadline: float) -> int:
        """Wait in line at the receiver; return the number of the granted piece."""
        loop = asyncio.get_running_loop()
        self._seq = seq = (self._seq + 1) % (1 << SEQ_BITS)
        grant: asyncio.Future[None] = loop.create_future()
        granted = False
        try:
            async with until(deadline, f"{peer.peer_id!r} took no piece"):
                while not peer.settled.is_set():
                    await peer.settled.wait()
                if peer.error is not None:
                    raise TransferError(f"no way to {peer.peer_id!r}") from peer.error
                patience_ms = max(0, int((deadline - loop.time()) * 1000))
                peer.grants[seq] = grant
                self._post(peer, Offer(peer.out, seq, patience_ms, encode_header(header)))
                await grant
            granted = True
        finally:
            in_line = peer.grants.pop(seq, None) is not None
            if in_line and not granted:
                self._post(peer, Withdrawal(peer.out, seq))
            if grant.done() and not grant.cancelled():
                grant.exception()  # mark it as seen: we may have been cancelled at this moment
        return seq

    async def _transmit(self, peer: Peer, seq: int, payload: torch.Tensor, deadline: float) -> None:
        """Push a granted payload; neither time-out nor cancellation returns before it ended."""
        push = asyncio.create_task(self._push(peer, seq, payload))
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(push)
        except TimeoutError as exc:
            await uninterrupted(self._end_push(peer, push, deadline))
            raise TransferTimeoutError(f"the payload to {peer.peer_id!r} stalled") from exc
        except asyncio.CancelledError:
            # It takes milliseconds: to let it end spares the others on this connection.
            await uninterrupted(self._end_push(peer, push, deadline))
            raise

    async def _end_push(self, peer: Peer, push: asyncio.Task[None], deadline: float) -> None:
        remaining = deadline - asyncio.get_running_loop().time()
        await asyncio.wait({push}, timeout=max(0.0, remaining))
        if not push.done():
            self._break(peer, "a payload stalled")  # or it is being torn down: that ends it, too
            await asyncio.wait({push})
        if not push.cancelled():
            push.exception()

    def _claim(self, channel: int, seq: int, nbytes: int) -> tuple[Peer, Landing] | None:
        """Return where a payload that has come is to land; None: nobody wants it."""
        peer = self._by_channel.get(channel)
        if peer is None:
            self.stats.strays += 1
            return None
        landing = self._arrivals.claim(peer, seq, nbytes)
        return None if landing is None else (peer, landing)

    def _on_message(self, data: bytes | bytearray | memoryview) -> None:
        """Handle what a carrier received, whatever it is."""
        try:
            message = decode_message(data)
        except ProtocolError as exc:
            self.stats.note_malformed(str(exc))
            return
        if isinstance(message, Hello):
            self._on_hello(message)
            return
        peer = self._by_channel.get(message.channel)
        if peer is None or not peer.connected:
            self.stats.strays += 1
            return
        match message:
            case Offer():
                self._on_offer(peer, message)
            case Grant(seq=seq):
                self._on_grant(peer, seq)
            case Refusal(seq=seq, reason=reason):
                self._on_refusal(peer, seq, reason)
            case Withdrawal(seq=seq):
                peer.drop_offer(seq)
                peer.give_up_landing(seq)
            case Bye():
                peer.left = True
                peer.reset(TransferError(f"{peer.peer_id!r} has disconnected"))
            case _:
                self.stats.note_malformed(f"a {type(message).__name__} without its payload")

    def _on_hello(self, hello: Hello) -> None:
        if hello.receiver != self._nonce:
            self.stats.strays += 1
            return
        peer = next((p for p in self._peers.values() if p.address.nonce == hello.sender), None)
        if peer is None:
            self._strangers[hello.sender] = hello.channel
            if len(self._strangers) > _MAX_STRANGERS:
                self._strangers.popitem(last=False)
        elif peer.repair is not None:
            peer.remote_channel = hello.channel  # settled when there is a way again
        elif peer.last_channel not in (None, hello.channel):
            self._follow(peer, hello.channel)
        elif peer.error is None:
            peer.settle(hello.channel)
            if hello.wants_reply:
                self._greet(peer, wants_reply=False)

    def _on_offer(self, peer: Peer, offer: Offer) -> None:
        try:
            header = decode_header(offer.header)
        except ProtocolError as exc:
            self._refuse(peer, offer.seq, str(exc))
            return
        if not 0 < header.nbytes <= self.staging.slot_bytes:
            fit = f"{header.nbytes} bytes do not fit a slot of {self.staging.slot_bytes}"
            self._refuse(peer, offer.seq, fit)
            return
        if len(peer.offers) >= _MAX_OFFERS:
            self._refuse(peer, offer.seq, f"more than {_MAX_OFFERS} offers at once")
            return
        deadline = asyncio.get_running_loop().time() + offer.timeout_ms / 1000
        peer.add_offer(offer.seq, Offered(header, deadline))

    def _refuse(self, peer: Peer, seq: int, reason: str) -> None:
        self.stats.note_malformed(f"a piece from {peer.peer_id!r}: {reason}")
        self._post(peer, Refusal(peer.out, seq, reason[:200]))

    def _on_grant(self, peer: Peer, seq: int) -> None:
        grant = peer.grants.get(seq)
        if grant is None:  # given up meanwhile: the slot is free for others
            self._post(peer, Withdrawal(peer.out, seq))
        elif not grant.done():
            grant.set_result(None)

    def _on_refusal(self, peer: Peer, seq: int, reason: str) -> None:
        grant = peer.grants.pop(seq, None)
        if grant is not None and not grant.done():
            grant.set_exception(TransferError(f"{peer.peer_id!r} refused the piece: {reason}"))
