"""The interface of a carrier.

Everything here is called in the engine's thread and never waits, except where it says otherwise.
One-sided carriers write into the receiver's staging slot from the sender's device, queued right
after the packing; two-sided ones send when the payload has been packed. A carrier leaves what it
has no use for as it is here.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import zmq

from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.errors import TransferError
from pagewire.shared.kv.messages import Segment


class Pending(Protocol):
    """Something that is under way."""

    def is_done(self) -> bool:
        """Whether it has ended, without waiting.

        Raises:
            TransferError: it has failed.
        """
        ...


def has_ended(pending: Pending) -> bool:
    """Whether something is not under way any more: it is done, or has failed."""
    try:
        return pending.is_done()
    except TransferError:
        return True


DONE: Pending = PendingMove(None)  # something that ended at once


class Outbound(Protocol):
    """The sender's half of one link.

    Attributes:
        reply: what the receiver's half needs to know, at most 4 KiB.
    """

    @property
    def reply(self) -> bytes:
        """See above."""
        return b""

    def stage(self, slot: int, credit: int, nbytes: int, packed: PendingMove) -> Pending | None:
        """Queue on the device, after a staging slot's packing, what comes before `send`.

        Args:
            slot: our staging slot; it is being packed.
            credit: the receiver's.
            nbytes: of the payload.
            packed: the packing.

        Returns:
            Ends after the packing; None if nothing was queued.
        """
        return None

    def send(self, segment: Segment, slot: int) -> Pending:
        """Announce a segment that has been packed and staged, and send what has not crossed.

        Returns:
            Ends when our staging slot may be used again.

        Raises:
            TransferError: the link is broken.
        """
        ...

    def close(self) -> None:
        """End it; what was queued on the device may still cross."""
        return None


class Inbound(Protocol):
    """The receiver's half of one link."""

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        """Take an announced payload into the staging slot `segment.credit`.

        Args:
            segment: its payload fits there.
            body: what came with the announcement.

        Returns:
            Ends when an unpacking that is queued from then on reads the payload.

        Raises:
            TransferError: the payload is not there.
        """
        return DONE

    def close(self) -> Pending:
        """End it; the result ends when nothing writes to the link's staging slots any more."""
        return DONE


class LinkSocket(Protocol):
    """What an `Outbound` announces segments over."""

    def post(self, segment: Segment, body: memoryview | None = None) -> Pending:
        """Send an announcement and, with it, bytes that stay untouched until the result ends.

        Raises:
            TransferError: the connection is gone, or does not keep up.
        """
        ...


class Carrier(Protocol):
    """A means of sending payloads, open in this process.

    Attributes:
        name: as it appears in settings, worker records and metrics.
    """

    name: ClassVar[str]

    @property
    def should_restart(self) -> bool:
        """Whether this process cannot open further links, and so should drain and end."""
        return False

    def offer(self, link: int) -> bytes:
        """Return what a sender needs to know, in at most 64 KiB.

        Raises:
            TransferError: this link cannot have this carrier; says why.
        """
        ...

    def inbound(self, link: int, reply: bytes) -> Inbound:
        """Return the receiver's half of a link whose sender has chosen this carrier.

        Args:
            link: as it was offered.
            reply: of the sender's half.

        Raises:
            TransferError: the reply makes no sense.
        """
        ...

    def withdraw(self, link: int) -> None:
        """Drop an offer that was not chosen; unknown links are fine."""
        return None

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link.

        Args:
            link: the receiver's number for it.
            offer: the receiver's.
            socket: for announcements.

        Raises:
            TransferError: payloads cannot cross to this receiver; says why.
        """
        ...

    def fds(self) -> list[int]:
        """File descriptors that become readable when `poll` has something to do."""
        return []

    def poll(self) -> bool:
        """Let the carrier's library work; returns whether anything has happened."""
        return False

    def close(self) -> None:
        """Free everything; all links have been closed. May wait for a moment."""
        return None
