"""What one side of a connection remembers of the other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pagewire.shared.errors import TransferError
from pagewire.shared.protocol import PieceHeader
from pagewire.shared.transfer.staging import StagingSlot
from pagewire.shared.transfer.wire import Address, Hello


@dataclass(frozen=True, slots=True)
class Offered:
    """A piece that the peer would like to send.

    Attributes:
        deadline: in the event loop's time; after it the peer will not send any more.
    """

    header: PieceHeader
    deadline: float


@dataclass(eq=False, slots=True)
class Landing:
    """A slot in which a piece is awaited or arriving.

    Attributes:
        expiry: gives the slot up if no payload comes.
        void: the connection has ended since; what arrives is dropped.
    """

    header: PieceHeader
    slot: StagingSlot
    expiry: asyncio.TimerHandle
    void: bool = False


@dataclass(eq=False, slots=True)
class Peer:
    """A connected peer.

    Attributes:
        channel: what the peer puts on its messages to us.
        remote_channel: what we put on ours to it; None until its `Hello` has come.
        last_channel: the latest of these; another one comes from a peer that has forgotten us.
        generation: how many ways the peer has made to us.
        num_resets: how often everything under way was forgotten; a send that waits for its payload
            sees by it that its offer is void.
        settled: set when pieces can be offered, both sides knowing each other's channel, or when
            they never will be (`error`).
        left: it has said `Bye` and not come back.
        error: why nothing can be sent to it any more.
        grants: pieces that we offered, by sequence number.
        offers: pieces that it offered, in the order of their arrival.
        offered: set while there are offers.
        credits: pieces that may be sent to it without waiting for a grant.
        held: slots that wait for its next pieces; it has a credit of ours for each.
        landings: pieces that have a slot here and have not begun to arrive.
        arriving: pieces whose bytes are on their way into a slot, by a future that ends when no
            byte is written any more.
        granter: answers the offers, one at a time.
        repair: makes a broken connection anew.
    """

    peer_id: str
    address: Address
    channel: int = 0
    remote_channel: int | None = None
    last_channel: int | None = None
    generation: int = 0
    num_resets: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    left: bool = False
    error: TransferError | None = None
    grants: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    offers: dict[int, Offered] = field(default_factory=dict)
    offered: asyncio.Event = field(default_factory=asyncio.Event)
    credits: int = 0
    held: list[StagingSlot] = field(default_factory=list)
    landings: dict[int, Landing] = field(default_factory=dict)
    arriving: dict[asyncio.Future[None], Landing] = field(default_factory=dict)
    granter: asyncio.Task[None] | None = None
    repair: asyncio.Task[None] | None = None

    @property
    def reachable(self) -> bool:
        """Whether it has said hello and there is a way to answer."""
        return self.remote_channel is not None and self.repair is None and self.error is None

    @property
    def out(self) -> int:
        """The channel of messages to the peer; raises TransferError while it is not known."""
        if self.remote_channel is None:
            raise TransferError(f"{self.peer_id!r} has not said hello")
        return self.remote_channel

    def learn(self, hello: Hello) -> None:
        """The peer has said hello."""
        self.remote_channel = self.last_channel = hello.channel
        self.generation = max(self.generation, hello.generation)
        self.left = False

    def fail(self, error: TransferError) -> None:
        """Nothing can be sent any more, until the peer is connected anew."""
        self.error = error
        self.settled.set()

    def add_offer(self, seq: int, offered: Offered) -> None:
        """Put a piece at the end of the line."""
        self.offers[seq] = offered
        self.offered.set()

    def drop_offer(self, seq: int) -> None:
        """Take a piece out of the line, if it is in there."""
        self.offers.pop(seq, None)
        if not self.offers:
            self.offered.clear()

    def next_offer(self, now: float) -> tuple[int, Offered] | None:
        """Take the first piece out of the line that the peer still wants to send."""
        while self.offers:
            seq = next(iter(self.offers))
            offered = self.offers[seq]
            self.drop_offer(seq)
            if offered.deadline > now:
                return seq, offered
        return None

    def give_up_landing(self, seq: int) -> bool:
        """Release the slot of a granted piece that will not come; False if there is none."""
        landing = self.landings.pop(seq, None)
        if landing is None:
            return False
        landing.expiry.cancel()
        landing.slot.release()
        return True

    def reset(self, error: TransferError) -> None:
        """Forget everything under way, both directions; sends in wait of a grant raise `error`."""
        self.remote_channel = None
        self.num_resets += 1
        if self.error is None:
            self.settled.clear()
        for grant in self.grants.values():
            if not grant.done():
                grant.set_exception(error)
        self.grants.clear()
        self.offers.clear()
        self.offered.clear()
        self.credits = 0
        while self.held:
            self.held.pop().release()
        for seq in list(self.landings):
            self.give_up_landing(seq)
        for landing in self.arriving.values():
            landing.void = True
