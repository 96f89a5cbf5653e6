"""Flow control of KV links: credits for the receiver's staging slots, on both sides. No I/O.

A worker has a fixed number of staging slots. Its receiver shares them equally among its links and
the worker's own sender, which counts as one more link while it has links itself. So whichever half
is alone has them all, and with both halves at work each user has at least one. All decisions come
back as messages to send; nothing here has a socket or a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from pagewire.shared.base.errors import IntegrityError, ProtocolError, TransferError
from pagewire.shared.transfer.messages import Grant, Reclaim, Return

# Of a link, if the worker does not send as well: while one segment is unpacked, the next is on its
# way.
MIN_CREDITS = 2
OWN_SENDER = -1  # in place of a link's number


@dataclass(slots=True)
class SenderCredits:
    """The credits that a sender has on one link.

    Attributes:
        idle: credits that are free to use, the one that has been idle longest first.
        in_use: credits taken and not acknowledged; whether each was reclaimed meanwhile.
        uses: number of the newest use, by credit.
    """

    idle: deque[int] = field(default_factory=deque)
    in_use: dict[int, bool] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)

    def grant(self, credits: list[int]) -> None:
        """Add credits that the receiver grants.

        Raises:
            ProtocolError: the sender has one already, or one is named twice; none is added.
        """
        for index, credit in enumerate(credits):
            if credit in self.in_use or credit in self.idle or credit in credits[:index]:
                raise ProtocolError(f"credit {credit} was granted twice")
        self.idle += credits

    def acquire(self) -> tuple[int, int]:
        """Take the first idle credit; return it and the number of its use. One must be idle."""
        credit = self.idle.popleft()
        self.in_use[credit] = False
        use = self.uses[credit] = self.uses.get(credit, 0) + 1
        return credit, use

    def acknowledge(self, credit: int, use: int) -> None:
        """End a use: the credit is idle again, unless it was reclaimed.

        Raises:
            ProtocolError: the credit is not in use, or this is not its current use.
        """
        if credit not in self.in_use or self.uses[credit] != use:
            raise ProtocolError(f"use {use} of credit {credit} was acknowledged and is not open")
        if not self.in_use.pop(credit):
            self.idle.append(credit)

    def reclaim(self, credit: int) -> Return | None:
        """Return a credit to the receiver: now by the returned message, or later by a segment.

        Raises:
            ProtocolError: the sender does not have it.
        """
        if self.in_use.get(credit) is False:
            self.in_use[credit] = True
            return None
        if credit not in self.idle:
            raise ProtocolError(f"credit {credit} was reclaimed and is not here")
        self.idle.remove(credit)
        return Return(credit)


class StagingSlotState(Enum):
    """What a staging slot is doing."""

    FREE = auto()
    LENT = auto()  # a credit of a link, idle or about to be used; or idle at the own sender
    # A segment was announced for it and not acknowledged; or the own sender packs or sends it.
    FILLED = auto()
    QUARANTINED = auto()  # its link has ended, and something may still be written to it


@dataclass(slots=True)
class _Slot:
    state: StagingSlotState = StagingSlotState.FREE
    link: int = 0  # that it is lent to, or filled by; they count from 1. Or `OWN_SENDER`
    is_reclaimed: bool = False


@dataclass(slots=True)
class StagingSlots:
    """The staging slots of a worker, and the links and the own sender that may use them.

    Attributes:
        num_slots: number of all staging slots.
        has_more: the own sender has got a staging slot since it last set this to False.
    """

    num_slots: int
    has_more: bool = False
    _slots: list[_Slot] = field(init=False)
    # In the order of their opening: by credit, the newest use. One that leaves a link and comes
    # back has had the uses that it had before.
    _links: dict[int, list[int]] = field(default_factory=dict)
    _idle: deque[int] = field(default_factory=deque)  # of the own sender, longest idle first

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.num_slots)]

    def count(self, state: StagingSlotState) -> int:
        """Return how many staging slots are in a state."""
        return sum(slot.state is state for slot in self._slots)

    def check_room(self, num_links: int) -> None:
        """Check that one more link may be opened.

        Args:
            num_links: links that are open already.

        Raises:
            TransferError: there are not enough staging slots for it, or not yet.
        """
        usable = self.num_slots - self.count(StagingSlotState.QUARANTINED)
        usable -= OWN_SENDER in self._links  # which keeps one
        if num_links >= min(self.num_slots // MIN_CREDITS, usable):
            raise TransferError(
                f"{num_links} KV links are open, and each needs {MIN_CREDITS} staging slots: there "
                f"are {self.num_slots} (PAGEWIRE_STAGING_SLOTS), {usable} left for links"
            )

    def open(self, link: int) -> list[tuple[int, Grant | Reclaim]]:
        """Open a link and rebalance; return the messages to send, with their links."""
        self._links[link] = [0] * self.num_slots
        return self._rebalance()

    def fill(self, link: int, credit: int, use: int) -> None:
        """Mark a staging slot as filled: a segment was announced for it.

        Raises:
            ProtocolError: the link does not have this credit, or has already made this use of it.
        """
        slot = self._slots[credit] if credit < self.num_slots else _Slot()
        is_lent = (slot.state, slot.link) == (StagingSlotState.LENT, link)
        if not is_lent or use <= self._links[link][credit]:
            raise ProtocolError(f"link {link} has no use {use} of credit {credit}")
        slot.state = StagingSlotState.FILLED
        self._links[link][credit] = use

    def empty(self, link: int, credit: int) -> list[tuple[int, Grant | Reclaim]]:
        """Mark a staging slot as empty: its segment is acknowledged. Return messages to send then.

        Raises:
            IntegrityError: no segment was announced.
        """
        slot = self._slots[credit]
        if (slot.state, slot.link) != (StagingSlotState.FILLED, link):
            raise IntegrityError(f"staging slot {credit} is not filled by link {link}")
        if not slot.is_reclaimed:
            slot.state = StagingSlotState.LENT
            return []
        self._slots[credit] = _Slot()
        return self._rebalance()

    def accept_return(self, link: int, credit: int) -> list[tuple[int, Grant | Reclaim]]:
        """Accept a returned credit, which was reclaimed; return the messages to send.

        Raises:
            ProtocolError: it was not reclaimed from this link.
        """
        slot = self._slots[credit] if credit < self.num_slots else _Slot()
        if (slot.state, slot.link) != (StagingSlotState.LENT, link) or not slot.is_reclaimed:
            raise ProtocolError(f"link {link} returns credit {credit}, which nobody asked for")
        self._slots[credit] = _Slot()
        return self._rebalance()

    def close(self, link: int) -> tuple[list[int], list[tuple[int, Grant | Reclaim]]]:
        """End a link with all its credits; ignore unknown links.

        Returns:
            The link's staging slots, to be released once nothing can be written to them; and the
            messages to send.
        """
        self._links.pop(link, None)
        lost = self._with(link)
        for index in lost:
            self._slots[index] = _Slot(StagingSlotState.QUARANTINED)
        return lost, self._rebalance()

    def release(self, slots: list[int]) -> list[tuple[int, Grant | Reclaim]]:
        """End the quarantine of staging slots; return the messages to send.

        Raises:
            IntegrityError: one is not in quarantine.
        """
        for index in slots:
            if self._slots[index].state is not StagingSlotState.QUARANTINED:
                raise IntegrityError(f"staging slot {index} is not in quarantine")
            self._slots[index] = _Slot()
        return self._rebalance()

    # The own sender

    @property
    def num_idle(self) -> int:
        """How many staging slots the own sender may take now."""
        return len(self._idle)

    def start_sending(self) -> list[tuple[int, Grant | Reclaim]]:
        """Give the own sender its share, if it has none; return the messages to send."""
        return [] if OWN_SENDER in self._links else self.open(OWN_SENDER)

    def stop_sending(self) -> list[tuple[int, Grant | Reclaim]]:
        """Take the own sender's share back, in use or not; return the messages to send."""
        self._links.pop(OWN_SENDER, None)
        for index in self._with(OWN_SENDER):
            self._slots[index].is_reclaimed = True
        self._free_idle()
        return self._rebalance()

    def acquire(self) -> int:
        """Take the own sender's staging slot that has been idle longest. One must be idle."""
        slot = self._idle.popleft()
        self._slots[slot].state = StagingSlotState.FILLED
        return slot

    def give_back(self, slot: int) -> list[tuple[int, Grant | Reclaim]]:
        """End the own sender's use of a staging slot; return the messages to send.

        Raises:
            IntegrityError: it was not acquired, or is given back twice.
        """
        messages = self.empty(OWN_SENDER, slot)
        if self._slots[slot].link == OWN_SENDER and slot not in self._idle:
            self._give_to_sender([slot])
        return messages

    def _give_to_sender(self, slots: list[int]) -> None:
        self._idle += slots
        self.has_more = True

    def _free_idle(self) -> bool:
        """Free the idle staging slots that are reclaimed from the own sender; return if any is."""
        reclaimed = [index for index in self._idle if self._slots[index].is_reclaimed]
        for index in reclaimed:
            self._idle.remove(index)
            self._slots[index] = _Slot()
        return bool(reclaimed)

    # Shares

    def _with(self, link: int) -> list[int]:
        """Return the staging slots that a link has, idle or in use."""
        return [n for n, slot in enumerate(self._slots) if slot.link == link]

    def _held(self, link: int) -> list[int]:
        """Return the staging slots of a link's credits, without those that are being reclaimed."""
        return [index for index in self._with(link) if not self._slots[index].is_reclaimed]

    def _rebalance(self) -> list[tuple[int, Grant | Reclaim]]:
        """Grant free staging slots to links below their share; reclaim credits above it."""
        if not self._links:
            return []
        share = (self.num_slots - self.count(StagingSlotState.QUARANTINED)) // len(self._links)
        messages: list[tuple[int, Grant | Reclaim]] = []
        free = deque(n for n, slot in enumerate(self._slots) if slot.state is StagingSlotState.FREE)
        missing = 0
        for link in self._links:
            wanted = share - len(self._held(link))
            granted = [free.popleft() for _ in range(min(wanted, len(free)))]
            for index in granted:
                self._slots[index] = _Slot(StagingSlotState.LENT, link)
            if granted and link == OWN_SENDER:
                self._give_to_sender(granted)
            elif granted:
                messages.append((link, Grant(granted)))
            missing += max(0, wanted - len(granted))
        missing -= sum(slot.is_reclaimed for slot in self._slots)
        for link in self._links if missing > 0 else ():
            held = self._held(link)
            # Idle ones first: they come back at once.
            held.sort(key=lambda index: self._slots[index].state is StagingSlotState.FILLED)
            for index in held[: min(missing, max(0, len(held) - share))]:
                self._slots[index].is_reclaimed = True
                if link != OWN_SENDER:
                    messages.append((link, Reclaim(index)))
                missing -= 1
        return messages + self._rebalance() if self._free_idle() else messages
