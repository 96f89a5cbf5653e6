"""What all transports have in common: payloads move only into slots that wait for them.

    sender                                   receiver
      | --Offer(header)--------------------->  | in line for a staging slot
      |                                        | takes a slot
      | <--------------------Grant-----------  |
      | ==payload===========================>  | into the slot, then out of `recv`

So a receiver without a free slot costs nobody any memory, and a sender that loses patience before
the payload leaves takes back its `Offer` without harm to the connection: no carrier can recall a
payload that it has begun to send. A receiver with slots to spare holds some for each peer and says
so by a `Credit`: then the payload follows its `Offer` as soon as it is packed, and the next credit
goes out when it has begun to arrive. Both sides say `Hello` when they connect, and nothing is
offered before both have. A connection whose payload stalls is broken off, and what was under way
fails; then it is made anew.

A carrier (ucx, zmq, loopback) is a subclass: it moves session messages and payloads. All of it
runs in one event loop; only slots come free in other threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from abc import abstractmethod
from collections import OrderedDict

import torch

from pagewire.shared.background import start_task
from pagewire.shared.errors import ProtocolError, TransferError
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.transfer.arrivals import Arrivals
from pagewire.shared.transfer.base import KvTransport, ReceivedPiece, UntilPacked, check_payload
from pagewire.shared.transfer.departures import Departures
from pagewire.shared.transfer.peer import Landing, Peer
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.transfer.waiting import uninterrupted, until
from pagewire.shared.transfer.wire import (
    CHANNEL_BITS,
    NONCE_BYTES,
    Bye,
    Credit,
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

_MAX_STRANGERS = 256  # peers that said hello before we connected to them
_MAX_WAYS = 4096  # incarnations of peers of which we know how often we linked to them
_REPAIR_TIMEOUT_S = 5.0
_LAST_WORD_S = 0.05
_ARRIVAL_GRACE_S = 0.5  # for payloads in motion when their sender is disconnected
_ARRIVAL_END_S = 5.0  # for them to notice that the way was given up


class SessionTransport(KvTransport):
    """A transport by offer and grant, over a carrier that a subclass provides."""

    def __init__(self, worker_id: str, staging: StagingPool) -> None:
        super().__init__(worker_id, staging)
        self._nonce = b""
        self._peers: dict[str, Peer] = {}
        self._by_channel: dict[int, Peer] = {}
        self._strangers: OrderedDict[bytes, Hello] = OrderedDict()
        self._ways_made: OrderedDict[bytes, int] = OrderedDict()
        self._arrivals = Arrivals(staging, self.stats, self._post)
        self._departures = Departures(self._post, self._break)
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
    def _push(self, peer: Peer, seq: int, payload: torch.Tensor) -> asyncio.Future[None]:
        """Begin to send a payload that is expected; called in a later turn than its offer.

        The future ends when its memory is no longer needed. It or this call raises `TransferError`.
        """

    @abstractmethod
    async def _close_carrier(self) -> None:
        """Free everything that `_open` made; all peers are unlinked. Safe if nothing was opened."""

    def hold_slots(self, count: int) -> None:
        """Hold so many slots for each peer's next pieces, as long as half of all stay free."""
        self._arrivals.max_held = count

    @property
    def num_held(self) -> int:
        """Slots that are held ahead at present."""
        return sum(len(peer.held) for peer in self._peers.values())

    async def start(self, timeout: float) -> bytes:
        """Open for peers; return the address that a peer passes to `connect`."""
        if self._nonce or self._closing is not None:
            raise TransferError("a transport is started once")
        self._nonce = os.urandom(NONCE_BYTES)
        self._arrivals.open()
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
        async with until(deadline, f"{peer_id!r} was not disconnected"):
            await self.disconnect(peer_id)
        self._check_open()
        try:
            async with until(deadline, f"{peer_id!r} did not answer"):
                await self._make_way(peer)
                while peer_id in self._peers:  # connected twice at once: the last one counts
                    await self.disconnect(peer_id)
            self._check_open()
            self._admit(peer)
        finally:
            if self._peers.get(peer_id) is not peer:
                await uninterrupted(self._unlink(peer))

    async def send(
        self,
        peer_id: str,
        header: PieceHeader,
        payload: torch.Tensor,
        timeout: float,
        until_packed: UntilPacked | None = None,
    ) -> None:
        """Send one piece; on return, whatever the outcome, the payload may be overwritten."""
        check_payload(header, payload)
        peer = self._peers.get(peer_id)
        if peer is None:
            raise TransferError(f"there is no peer {peer_id!r}")
        seq, deadline = await self._departures.reserve(peer, header, until_packed, timeout)
        await self._departures.transmit(peer, self._push(peer, seq, payload), deadline)

    async def recv(self) -> ReceivedPiece:
        """Return the next piece of any peer; waits without bound."""
        return await self._arrivals.next()

    async def disconnect(self, peer_id: str) -> None:
        """Forget a peer: its sends fail, its pieces that nobody has taken are dropped."""
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        teardown = start_task(self._tear_down(peer), f"disconnecting {peer_id}")
        self._teardowns.add(teardown)
        teardown.add_done_callback(self._teardowns.discard)
        await asyncio.shield(teardown)

    async def close(self) -> None:
        """Disconnect all peers and free everything. Safe to call twice."""
        if self._closing is None:
            self._closing = start_task(self._shut_down(), "closing a transport")
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        for peer_id in list(self._peers):
            await self.disconnect(peer_id)
        if self._teardowns:  # of callers who were cancelled
            await asyncio.wait(self._teardowns)
        self._arrivals.close()
        await self._close_carrier()

    def _check_open(self) -> None:
        if self._closing is not None or not self._nonce:
            raise TransferError("the transport is not open")

    def _admit(self, peer: Peer) -> None:
        """Begin to deal with a peer to which there is a way."""
        self._peers[peer.peer_id] = peer
        self._number(peer)
        self._start_granter(peer)
        self._greet(peer)

    def _start_granter(self, peer: Peer) -> None:
        """Begin to answer a peer's offers; begin anew, all forgotten, should that ever fail."""

        def on_end(granter: asyncio.Task[None]) -> None:
            if not granter.cancelled() and self._peers.get(peer.peer_id) is peer:
                self._start_granter(peer)
                self._break(peer, "its offers were not answered")

        name = f"granting pieces of {peer.peer_id}"
        peer.granter = start_task(self._arrivals.grant_offers(peer), name)
        peer.granter.add_done_callback(on_end)

    async def _make_way(self, peer: Peer) -> None:
        """Link to a peer, as often as it has linked to us at least."""
        nonce = peer.address.nonce
        if early := self._strangers.pop(nonce, None):
            peer.learn(early)
        while True:
            await self._link(peer)
            self._ways_made[nonce] = made = self._ways_made.pop(nonce, 0) + 1
            if len(self._ways_made) > _MAX_WAYS:
                self._ways_made.popitem(last=False)
            if made >= peer.generation:
                return
            await self._unlink(peer)

    def _greet(self, peer: Peer) -> None:
        nonce, echo = peer.address.nonce, peer.remote_channel or 0
        made = self._ways_made.get(nonce, 1)
        self._post(peer, Hello(self._nonce, nonce, peer.channel, echo, made))

    async def _tear_down(self, peer: Peer) -> None:
        """End everything that belongs to a peer that is no longer in `_peers`."""
        if peer.reachable:
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
            _, stuck = await asyncio.wait(peer.arriving, timeout=_ARRIVAL_END_S)
            if stuck:  # each gives its slot back when it ends
                logger.error("%d pieces of %r are still arriving", len(stuck), peer.peer_id)
        self._arrivals.drop(peer)

    def _break(self, peer: Peer, reason: str) -> None:
        """Drop what is under way with a peer and make the way to it anew, unless it has left."""
        if self._peers.get(peer.peer_id) is not peer or peer.repair or peer.error:
            return
        peer.reset(TransferError(f"the connection to {peer.peer_id!r} broke: {reason}"))
        self._start_repair(peer, reason)

    def _number(self, peer: Peer) -> None:
        """Choose what the peer puts on its messages to us."""
        while not peer.channel or peer.channel in self._by_channel:
            peer.channel = secrets.randbits(CHANNEL_BITS)
        self._by_channel[peer.channel] = peer

    def _start_repair(self, peer: Peer, reason: str | None = None) -> None:
        def on_end(repair: asyncio.Task[None]) -> None:
            if not repair.cancelled() and (bug := repair.exception()) is not None:
                peer.fail(TransferError(str(bug)))

        peer.repair = start_task(self._repair(peer, reason), f"making a way to {peer.peer_id}")
        peer.repair.add_done_callback(on_end)

    async def _repair(self, peer: Peer, reason: str | None) -> None:
        """Make the way to a peer anew.

        Args:
            peer: it has been reset.
            reason: why we broke the connection; None if the peer has made it anew.
        """
        deadline = asyncio.get_running_loop().time() + _REPAIR_TIMEOUT_S
        try:
            await self._unlink(peer)
            if reason is not None:
                await asyncio.sleep(_LAST_WORD_S)  # it may be slower than the news of the closing
                if peer.left:
                    peer.fail(TransferError(f"{peer.peer_id!r} has disconnected"))
                    return
                self._forget(peer, reason)
            async with until(deadline, f"{peer.peer_id!r} did not answer"):
                await self._make_way(peer)
        except TransferError as exc:
            logger.warning("no way to %r any more: %s", peer.peer_id, exc)
            peer.fail(exc)
            return
        finally:
            peer.repair = None
        self._greet(peer)

    def _forget(self, peer: Peer, reason: str) -> None:
        self.stats.broken += 1
        logger.warning("KV connection to %r broken off: %s", peer.peer_id, reason)
        del self._by_channel[peer.channel]
        peer.channel = 0
        self._number(peer)  # anew, which tells the peer that we have forgotten all

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
        if peer is not None and isinstance(message, Bye):
            peer.left = True
            peer.reset(TransferError(f"{peer.peer_id!r} has disconnected"))
            return
        if peer is None or not peer.reachable:
            self.stats.strays += 1
            return
        match message:
            case Offer():
                self._arrivals.on_offer(peer, message)
            case Withdrawal(seq=seq):
                self._arrivals.on_withdrawal(peer, seq)
            case Grant(seq=seq):
                self._departures.on_grant(peer, seq)
            case Credit(given_on=peer.remote_channel):
                self._departures.on_credit(peer)
            case Credit():
                self.stats.strays += 1
            case Refusal(seq=seq, reason=reason):
                self._departures.on_refusal(peer, seq, reason)
            case _:
                self.stats.note_malformed(f"a {type(message).__name__} without its payload")

    def _on_hello(self, hello: Hello) -> None:
        if hello.receiver != self._nonce:
            self.stats.strays += 1
            return
        peer = next((p for p in self._peers.values() if p.address.nonce == hello.sender), None)
        if peer is None:
            self._strangers[hello.sender] = hello
            if len(self._strangers) > _MAX_STRANGERS:
                self._strangers.popitem(last=False)
        elif peer.repair is not None:
            peer.learn(hello)  # answered when there is a way again
        else:
            self._meet(peer, hello)

    def _meet(self, peer: Peer, hello: Hello) -> None:
        """Get in step with a peer that has said hello; answer unless it knows all by now."""
        made = self._ways_made.get(hello.sender, 0)
        behind = hello.generation > made
        if behind:
            peer.error = None
        if behind or peer.last_channel not in (None, hello.channel):
            peer.reset(TransferError(f"{peer.peer_id!r} has connected anew"))
        peer.learn(hello)
        if behind:
            self._start_repair(peer)
            return
        if peer.error is not None:
            return
        news = not peer.settled.is_set()
        known = hello.echo == peer.channel
        if known:
            peer.settled.set()
        if news or not known or hello.generation < made:
            self._greet(peer)
