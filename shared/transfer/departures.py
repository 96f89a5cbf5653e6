"""The sending half of a session: a place in line at the receiver, then the payload."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from pagewire.shared.errors import TransferError, TransferTimeoutError
from pagewire.shared.protocol import PieceHeader, encode_header
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

    async def obtain_grant(self, peer: Peer, header: PieceHeader, deadline: float) -> int:
        """Take a slot that the receiver holds for us, or wait in line there.

        Returns:
            The number under which the piece is expected there.

        Raises:
            TransferTimeoutError: it was not our turn in time; the receiver has forgotten us.
            TransferError: the receiver does not want the piece, or the connection has ended.
        """
        loop = asyncio.get_running_loop()
        self._seq = seq = (self._seq + 1) % (1 << SEQ_BITS)
        grant: asyncio.Future[None] = loop.create_future()
        granted = False
        try:
            async with until(deadline, f"{peer.peer_id!r} took no piece"):
                while not peer.settled.is_set():
                    await peer.settled.wait()
                if peer.error is not None:
                    raise TransferError(f"no way to {peer.peer_id!r}: {peer.error}") from peer.error
                patience_ms = max(0, int((deadline - loop.time()) * 1000))
                encoded = encode_header(header)
                # A payload without time would stall, and break the connection.
                if peer.credits and patience_ms and len(encoded) <= _MAX_HEADER_BY_CREDIT:
                    peer.credits -= 1
                    self._post(peer, Offer(peer.out, seq, patience_ms, encoded, peer.channel))
                    return seq
                peer.grants[seq] = grant
                self._post(peer, Offer(peer.out, seq, patience_ms, encoded))
                await grant
            granted = True
        finally:
            in_line = peer.grants.pop(seq, None) is not None
            if in_line and not granted:
                self._post(peer, Withdrawal(peer.out, seq))
            if grant.done() and not grant.cancelled():
                grant.exception()  # mark it as seen: we may have been cancelled at this moment
        return seq

    async def transmit(
        self, peer: Peer, pushing: Coroutine[Any, Any, None], deadline: float
    ) -> None:
        """See a payload off; neither time-out nor cancellation returns before `pushing` ended.

        Raises:
            TransferTimeoutError: it stalled; the connection has been broken off.
            TransferError: the connection has ended.
        """
        push = asyncio.create_task(pushing)
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(push)
        except TimeoutError as exc:
            await uninterrupted(self._end(peer, push, deadline))
            raise TransferTimeoutError(f"the payload to {peer.peer_id!r} stalled") from exc
        except asyncio.CancelledError:
            # It takes milliseconds: to let it end spares the others on this connection.
            await uninterrupted(self._end(peer, push, deadline))
            raise

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

    async def _end(self, peer: Peer, push: asyncio.Task[None], deadline: float) -> None:
        remaining = deadline - asyncio.get_running_loop().time()
        await asyncio.wait({push}, timeout=max(0.0, remaining))
        if not push.done():
            self._break_off(peer, "a payload stalled")
            await asyncio.wait({push})
        error = None if push.cancelled() else push.exception()
        if error is not None and not isinstance(error, TransferError):
            logger.error("a payload to %r failed", peer.peer_id, exc_info=error)
