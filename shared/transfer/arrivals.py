"""The receiving half of a session: offers in line, slots granted, payloads coming in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from pagewire.shared.background import start_task
from pagewire.shared.errors import ProtocolError, TransferError
from pagewire.shared.protocol import PieceHeader, decode_header
from pagewire.shared.transfer.base import ReceivedPiece, TransportStats
from pagewire.shared.transfer.peer import Landing, Offered, Peer
from pagewire.shared.transfer.staging import StagingPool, StagingSlot
from pagewire.shared.transfer.wire import Credit, Grant, Offer, Refusal, SessionMessage

logger = logging.getLogger(__name__)

_MAX_OFFERS = 1024  # of one peer in line; more are refused
_MAX_REASON_LENGTH = 200
_GRANT_SLACK_S = 0.5  # a granted slot is held this long after the sender's patience has ended


class Arrivals:
    """Takes slots for offered pieces and queues what has landed in them.

    Args:
        staging: where the slots come from.
        stats: counts what goes wrong.
        post: sends a session message to a peer without waiting.

    Attributes:
        max_held: slots that are held for each peer that has offered a piece before, so that its
            next ones need no grant. At least half of all slots stay free for everybody.
    """

    def __init__(
        self,
        staging: StagingPool,
        stats: TransportStats,
        post: Callable[[Peer, SessionMessage], None],
    ) -> None:
        self._staging = staging
        self._stats = stats
        self._post = post
        self.max_held = 0
        # Every piece in it holds a slot, so it is never full when one has landed.
        self._landed: asyncio.Queue[ReceivedPiece] = asyncio.Queue(staging.num_slots)
        self._moving: set[asyncio.Task[None]] = set()
        # Peers for which fewer than `max_held` slots are held, for want of free ones; who sent last
        # comes last.
        self._short: dict[Peer, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin to watch the pool; call it in the transport's event loop."""
        self._loop = asyncio.get_running_loop()
        self._staging.watch(self._on_free)

    def close(self) -> None:
        """Stop watching the pool; all peers have been dropped."""
        self._staging.unwatch(self._on_free)

    def _on_free(self) -> None:
        """A slot has come free; from any thread."""
        if self._short and self._loop is not None:
            # Its event loop may be closed by now: nobody is there to hold a slot for.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hold_more)

    def _hold_more(self) -> None:
        """Hold slots for peers that are short of them; first for who sent last."""
        for peer in reversed(list(self._short)):
            self._hold_for(peer)

    async def next(self) -> ReceivedPiece:
        """Return the next landed piece; waits without bound."""
        return await self._landed.get()

    async def grant_offers(self, peer: Peer) -> None:
        """Answer a peer's offers one after the other, as slots come free; never returns.

        One waiter in the pool per peer, and a pool that serves first come first: so all peers
        get their turn.
        """
        loop = asyncio.get_running_loop()
        while True:
            await peer.offered.wait()
            slot = await self._staging.acquire()
            offer = peer.next_offer(loop.time())
            if offer is None:  # withdrawn while we waited
                slot.release()
                continue
            self._grant(peer, *offer, slot)

    def _grant(self, peer: Peer, seq: int, offered: Offered, slot: StagingSlot) -> None:
        self._await_payload(peer, seq, offered, slot)
        self._post(peer, Grant(peer.out, seq))

    def _await_payload(self, peer: Peer, seq: int, offered: Offered, slot: StagingSlot) -> None:
        loop = asyncio.get_running_loop()
        expiry = loop.call_at(offered.deadline + _GRANT_SLACK_S, self._expire, peer, seq)
        peer.landings[seq] = Landing(offered.header, slot, expiry)

    def on_offer(self, peer: Peer, offer: Offer) -> None:
        """Take an offered piece; hold slots for the next unless its payload is to follow.

        A credit sent now would delay that payload, so it is sent when the payload has begun to
        arrive.
        """
        if offer.by_credit:
            if not self._take_by_credit(peer, offer):
                self.hold(peer)
        else:
            self._take(peer, offer)
            self.hold(peer)

    def hold(self, peer: Peer) -> None:
        """Hold slots for the next pieces of a peer that sends, as long as half of all stay free."""
        self._short.pop(peer, None)
        self._hold_for(peer)

    def _hold_for(self, peer: Peer) -> None:
        staging = self._staging
        while len(peer.held) < self.max_held and peer.reachable:
            self._short[peer] = None  # before the look: a slot may come free behind it
            keeps_half = 2 * (staging.num_free - 1) >= staging.num_slots
            slot = staging.try_acquire() if keeps_half else None
            if slot is None:
                return
            peer.held.append(slot)
            self._post(peer, Credit(peer.out, peer.channel))
        self._short.pop(peer, None)

    def _take_by_credit(self, peer: Peer, offer: Offer) -> bool:
        """Let the payload into a held slot; False if it will not be let in."""
        if offer.by_credit != peer.remote_channel:
            self._stats.strays += 1
            return False
        if not peer.held or offer.seq in peer.landings:
            self._stats.note_malformed(f"{peer.peer_id!r} sent a piece that was not granted")
            return False
        slot = peer.held.pop()  # first: to refuse the piece may break the connection
        header = self._header_of(peer, offer)
        if header is None:
            slot.release()
            return False
        self._await_payload(peer, offer.seq, Offered(header, _deadline(offer)), slot)
        return True

    def _header_of(self, peer: Peer, offer: Offer) -> PieceHeader | None:
        """Return the header of an offer; None if the offer has been refused."""
        try:
            header = decode_header(offer.header)
        except ProtocolError as exc:
            self._refuse(peer, offer.seq, str(exc))
            return None
        if 0 < header.nbytes <= self._staging.slot_bytes:
            return header
        fit = f"{header.nbytes} bytes do not fit a slot of {self._staging.slot_bytes}"
        self._refuse(peer, offer.seq, fit)
        return None

    def _take(self, peer: Peer, offer: Offer) -> None:
        """Grant an offered piece at once if nobody waits before it; else put it in line.

        One that cannot be taken is refused.
        """
        if offer.seq in peer.offers or offer.seq in peer.landings:
            self._stats.note_malformed(f"{peer.peer_id!r} offered piece {offer.seq} again")
            return
        header = self._header_of(peer, offer)
        if header is None:
            return
        if len(peer.offers) >= _MAX_OFFERS:
            self._refuse(peer, offer.seq, f"more than {_MAX_OFFERS} offers at once")
        else:
            offered = Offered(header, _deadline(offer))
            is_first = offer.timeout_ms > 0 and not peer.offers
            slot = self._staging.try_acquire() if is_first else None
            if slot is not None:
                self._grant(peer, offer.seq, offered, slot)
            else:
                peer.add_offer(offer.seq, offered)

    def on_withdrawal(self, peer: Peer, seq: int) -> None:
        """Forget an offered piece; hold another slot if it had one."""
        peer.drop_offer(seq)
        if peer.give_up_landing(seq):
            self._hold_for(peer)

    def claim(self, peer: Peer, seq: int, nbytes: int) -> Landing | None:
        """Return the landing of a payload that has come; None if nobody awaits this payload."""
        landing = peer.landings.get(seq)
        if landing is None:
            self._stats.strays += 1
            return None
        if nbytes != landing.header.nbytes:
            peer.give_up_landing(seq)
            self._stats.note_malformed(
                f"a payload of {nbytes} bytes from {peer.peer_id!r}, {landing.header.nbytes} in "
                "its header"
            )
            self.hold(peer)
            return None
        del peer.landings[seq]
        landing.expiry.cancel()
        return landing

    def begin(self, peer: Peer, landing: Landing) -> Callable[[TransferError | None], None]:
        """Note that a claimed payload begins to come in; then `hold` slots for the next.

        Returns:
            What to call, once, when no byte is written any more; with the error if the payload is
            lost.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        peer.arriving[ended] = landing

        def end(error: TransferError | None) -> None:
            del peer.arriving[ended]
            ended.set_result(None)
            self._finish(peer, landing, error)

        return end

    def land(self, peer: Peer, landing: Landing, moving: Coroutine[Any, Any, None]) -> None:
        """Let a claimed payload come in; `moving` ends when no byte is written any more."""
        moved = _report_end(moving, self.begin(peer, landing))
        task = start_task(moved, f"a piece of {peer.peer_id}")
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)
        self.hold(peer)

    def drop(self, peer: Peer) -> None:
        """Forget a peer; release the slots of its landed pieces that nobody has taken yet."""
        self._short.pop(peer, None)
        pieces = [self._landed.get_nowait() for _ in range(self._landed.qsize())]
        for piece in pieces:
            if piece.peer_id == peer.peer_id:
                piece.slot.release()
            else:
                self._landed.put_nowait(piece)

    def _refuse(self, peer: Peer, seq: int, reason: str) -> None:
        self._stats.note_malformed(f"a piece from {peer.peer_id!r}: {reason}")
        self._post(peer, Refusal(peer.out, seq, reason[:_MAX_REASON_LENGTH]))

    def _expire(self, peer: Peer, seq: int) -> None:
        if peer.give_up_landing(seq):
            self._stats.expired += 1
            self.hold(peer)

    def _finish(self, peer: Peer, landing: Landing, error: TransferError | None) -> None:
        if error is not None:
            logger.warning("a piece from %r was lost on its way: %s", peer.peer_id, error)
        if error is not None or landing.void:
            landing.slot.release()
        else:
            self._landed.put_nowait(ReceivedPiece(peer.peer_id, landing.header, landing.slot))


async def _report_end(
    moving: Coroutine[Any, Any, None], end: Callable[[TransferError | None], None]
) -> None:
    """Report how a payload's way ends, whatever comes up on it."""
    error: TransferError | None = TransferError("receiving it ended early")
    try:
        await moving
        error = None
    except TransferError as exc:
        error = exc
    finally:
        end(error)


def _deadline(offer: Offer) -> float:
    return asyncio.get_running_loop().time() + offer.timeout_ms / 1000
