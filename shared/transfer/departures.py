"""The sending half of a session: a place in line at the receiver, then the payload."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from pagewire.shared.errors import TransferError, TransferTimeoutError
from pagewire.shared.protocol import PieceHeader, encode_header
from pagewire.shared.transfer.base import UntilPacked
from pagewire.shared.transfer.peer import Peer
from pagewire.shared.transfer.waiting import uninterrupted, until
from pagewire.shared.transfer.wire import SEQ_BITS, Offer, SessionMessage, Withdrawal

logger = logging.getLogger(__name__)

# A carrier must not be able to deliver the payload before its offer. It delivers in order what it
# sends as a whole, and short messages are.
_MAX_HEADER_BY_CREDIT = 1024


class Departures:
    """Gets offered pieces granted and sees their payloads off.

    Args:
        post: sends a session message to a peer without waiting.
        break_off: ends a connection, and with it all pushes on it.
    """

    def __init__(
        self,
        post: Callable[[Peer, SessionMessage], None],
        break_off: Callable[[Peer, str], None],
    ) -> None:
        self._post = post
        self._break_off = break_off
        # Never begun anew, so that nothing left of an earlier connection is mistaken for ours.
        self._seq = secrets.randbits(SEQ_BITS)

    async def reserve(
        self, peer: Peer, header: PieceHeader, until_packed: UntilPacked | None, timeout: float
    ) -> tuple[int, float]:
        """Offer a piece; return when it is packed and a slot waits for it.

        Args:
            peer: the receiver.
            header: of the piece.
            until_packed: waits until the payload is there. A piece for a slot that is held for us
                is offered before that; one that has to wait in line is not, lest it keep a slot
                from others that have something to send.
            timeout: seconds. Of those for which the receiver keeps a slot, half are the payload's.

        Returns:
            The number under which the payload is expected there from now on, and in the event
            loop's time, until when.

        Raises:
            TransferTimeoutError: it was not our turn in time; the receiver has forgotten us. Or
                the payload was not there in time.
            TransferError: the receiver does not want the piece, or the connection has ended.
            Exception: whatever `until_packed` raises; the offer is withdrawn.
        """
        self._seq = seq = (self._seq + 1) % (1 << SEQ_BITS)
        encoded = encode_header(header)
        deadline = _deadline(timeout)
        num_resets = peer.num_resets  # before the offer: to send it may break the connection
        if not self._offer_by_credit(peer, seq, encoded, deadline):
            if until_packed is not None:
                await _in_time(until_packed, deadline)
                until_packed, deadline = None, _deadline(timeout)
            num_resets = await self._wait_in_line(peer, seq, encoded, deadline)
        await self._stand_by(peer, seq, num_resets, until_packed, _deadline(timeout / 2))
        return seq, deadline

    def _offer_by_credit(self, peer: Peer, seq: int, encoded: bytes, deadline: float) -> bool:
        """Offer a piece for a slot that is held for us; False if there is none."""
        may_offer = peer.settled.is_set() and peer.error is None
        if not may_offer or not peer.credits or len(encoded) > _MAX_HEADER_BY_CREDIT:
            return False
        patience_ms = _patience_ms(deadline)
        if not patience_ms:  # a payload without time would stall, and break the connection
            return False
        peer.credits -= 1
        self._post(peer, Offer(peer.out, seq, patience_ms, encoded, peer.channel))
        return True

    async def _wait_in_line(self, peer: Peer, seq: int, encoded: bytes, deadline: float) -> int:
        """Wait for a slot; return how often the peer had been reset when the piece was offered."""
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        granted = False
        try:
            async with until(deadline, f"{peer.peer_id!r} took no piece"):
                while not peer.settled.is_set():
                    await peer.settled.wait()
                if peer.error is not None:
                    raise TransferError(f"no way to {peer.peer_id!r}: {peer.error}") from peer.error
                num_resets = peer.num_resets
                if self._offer_by_credit(peer, seq, encoded, deadline):
                    return num_resets
                peer.grants[seq] = grant
                self._post(peer, Offer(peer.out, seq, _patience_ms(deadline), encoded))
                await grant
            granted = True
        finally:
            in_line = peer.grants.pop(seq, None) is not None
            if in_line and not granted:
                self._post(peer, Withdrawal(peer.out, seq))
            if grant.done() and not grant.cancelled():
                grant.exception()  # mark it as seen: we may have been cancelled at this moment
        return num_resets

    async def _stand_by(
        self,
        peer: Peer,
        seq: int,
        num_resets: int,
        until_packed: UntilPacked | None,
        deadline: float,
    ) -> None:
        """Wait until a payload is there for which a slot is kept; give the slot up if it fails.

        Args:
            peer: the receiver.
            seq: of the piece.
            num_resets: of the peer when the piece was offered.
            until_packed: waits for the payload, if it is not there yet.
            deadline: of that, in the event loop's time.
        """
        is_there = False
        try:
            # A payload leaves in a later turn than its offer. Where both left in one, and the peer
            # hung, UCX 1.21 crashed when the connection was made anew: its TCP handled an event of
            # an endpoint that was gone (conn_match.c).
            await asyncio.sleep(0)
            if until_packed is not None:
                await _in_time(until_packed, deadline)
            is_there = True
        finally:
            if not is_there and peer.num_resets == num_resets and peer.reachable:
                self._post(peer, Withdrawal(peer.out, seq))
        if peer.num_resets != num_resets:
            raise TransferError(f"the connection to {peer.peer_id!r} broke")

    async def transmit(self, peer: Peer, push: asyncio.Future[None], deadline: float) -> None:
        """See a payload off; neither time-out nor cancellation returns before `push` has ended.

        Raises:
            TransferTimeoutError: it stalled; the connection has been broken off.
            TransferError: the connection has ended.
        """
        try:
            await asyncio.wait({push}, timeout=_left_s(deadline))
        except asyncio.CancelledError:
            # It takes milliseconds: to let it end spares the others on this connection.
            await uninterrupted(self._end(peer, push, deadline))
            raise
        if not push.done():
            await uninterrupted(self._end(peer, push, deadline))
            raise TransferTimeoutError(f"the payload to {peer.peer_id!r} stalled")
        push.result()

    def on_grant(self, peer: Peer, seq: int) -> None:
        """The receiver holds a slot for a piece."""
        grant = peer.grants.get(seq)
        if grant is None:  # given up meanwhile: the slot is free for others
            self._post(peer, Withdrawal(peer.out, seq))
        elif not grant.done():
            grant.set_result(None)

    def on_credit(self, peer: Peer) -> None:
        """The receiver holds a slot for a piece that is still to come."""
        peer.credits += 1

    def on_refusal(self, peer: Peer, seq: int, reason: str) -> None:
        """The receiver will never take a piece."""
        grant = peer.grants.pop(seq, None)
        if grant is not None and not grant.done():
            grant.set_exception(TransferError(f"{peer.peer_id!r} refused the piece: {reason}"))

    async def _end(self, peer: Peer, push: asyncio.Future[None], deadline: float) -> None:
        await asyncio.wait({push}, timeout=_left_s(deadline))
        if not push.done():
            self._break_off(peer, "a payload stalled")
            await asyncio.wait({push})
        error = None if push.cancelled() else push.exception()
        if error is not None and not isinstance(error, TransferError):
            logger.error("a payload to %r failed", peer.peer_id, exc_info=error)


async def _in_time(until_packed: UntilPacked, deadline: float) -> None:
    async with until(deadline, "the payload was not packed"):
        await until_packed()


def _deadline(timeout: float) -> float:
    return asyncio.get_running_loop().time() + timeout


def _patience_ms(deadline: float) -> int:
    return int(_left_s(deadline) * 1000)


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())
