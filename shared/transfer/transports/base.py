"""The interface that each transport of KV payloads implements.

All methods are called in the engine's thread and never wait, unless their docstring says otherwise.
A one-sided transport writes into the receiver's staging slot from the sender's device, by a copy
that is queued right after the packing. A two-sided transport sends once the payload has been
packed. A segment may be announced before that. A transport inherits the methods that it does not
need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import zmq

from pagewire.shared.base.errors import TransferError
from pagewire.shared.engine.execution.block_mover import PendingMove
from pagewire.shared.transfer.messages import Segment


class Pending(Protocol):
    """An operation that is under way."""

    def poll(self) -> bool:
        """Go on with it, without waiting; return whether it has ended.

        Raises:
            TransferError: it has failed.
        """
        ...


def poll_settled(pending: Pending) -> bool:
    """Poll an operation; return whether it has ended, well or not."""
    try:
        return pending.poll()
    except TransferError:
        return True


DONE: Pending = PendingMove(None)  # something that ended at once


@dataclass(slots=True)
class Then:
    """An operation that begins, by a call of `poll`, once another one has ended."""

    first: Pending
    begin: Callable[[], Pending]
    _begun: Pending | None = None

    def poll(self) -> bool:
        """Begin it if the first one has ended; return whether it has ended.

        Raises:
            TransferError: one of them has failed.
        """
        if self._begun is None and self.first.poll():
            try:
                self._begun = self.begin()
            except Exception as exc:  # whatever a device or a library raises
                raise TransferError(str(exc)) from exc
        return self._begun is not None and self._begun.poll()


class Outbound(Protocol):
    """The sender's half of one link.

    Attributes:
        reply: what the receiver's half needs to know, at most `MAX_REPLY_BYTES`.
    """

    @property
    def reply(self) -> bytes:
        """What the receiver's half needs to know; empty if it needs nothing."""
        return b""

    def send(self, segment: Segment, slot: int, packed: PendingMove) -> Pending:
        """Announce a segment, at once or later; send its payload once that is packed.

        Args:
            segment: the announcement.
            slot: the sender's staging slot, which is being packed.
            packed: the packing.

        Returns:
            Ends when the sender's staging slot may be used again. The transport may need its
            `poll` to go on.

        Raises:
            TransferError: the link is broken.
            Exception: whatever a device or a library raises.
        """
        ...

    def close(self) -> None:
        """End the link; copies that are queued on the device may still be made."""
        return None


class Inbound(Protocol):
    """The receiver's half of one link."""

    def receive(self, segment: Segment, body: zmq.Frame | None) -> Pending:
        """Receive an announced payload into the staging slot `segment.credit`.

        Args:
            segment: the announcement; the payload fits into the staging slot.
            body: the payload, if it came with the announcement.

        Returns:
            Ends when the payload is there for all devices that unpack it.

        Raises:
            TransferError: the payload is missing.
        """
        return DONE

    def close(self) -> Pending:
        """End the link; the result ends when nothing writes to its staging slots any more."""
        return DONE


class LinkSocket(Protocol):
    """What an `Outbound` announces segments over.

    Attributes:
        peer: name of the receiver.
    """

    peer: str

    def post(self, segment: Segment, body: memoryview | None = None) -> Pending:
        """Send an announcement and, with it, bytes that stay untouched until the result ends.

        Raises:
            TransferError: the connection is lost, or does not keep up.
        """
        ...


class Transport(Protocol):
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
            TransferError: this transport cannot serve the link; says why.
        """
        ...

    def inbound(self, link: int, reply: bytes) -> Inbound:
        """Return the receiver's half of a link whose sender has chosen this transport.

        Args:
            link: number of the link, as in `offer`.
            reply: the reply of the sender's half.

        Raises:
            TransferError: the reply is malformed.
        """
        ...

    def withdraw(self, link: int) -> None:
        """Drop an offer that was not chosen; ignore unknown links."""
        return None

    def outbound(self, link: int, offer: bytes, socket: LinkSocket) -> Outbound:
        """Return the sender's half of a link.

        Args:
            link: the receiver's number of the link.
            offer: the receiver's offer.
            socket: for announcements.

        Raises:
            TransferError: payloads cannot be sent to this receiver; says why.
        """
        ...

    def fds(self) -> list[int]:
        """File descriptors that become readable when `poll` has something to do."""
        return []

    def poll(self) -> bool:
        """Let the transport's library work; return whether anything has happened."""
        return False

    def close(self) -> None:
        """Free everything; all links have been closed. May wait for a moment."""
        return None
