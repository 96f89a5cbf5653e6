"""A model of the staging slots of a worker: its own sender, its links, and their messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pagewire.shared.transfer.endpoint.credits import (
    MIN_CREDITS,
    SenderCredits,
    StagingSlots,
    StagingSlotState,
)
from pagewire.shared.transfer.messages import Grant, Reclaim, Return

NUM_CREDITS = 8  # at least the staging slots of any test's receiver


class Use(int):
    """The number of a use of a credit; all numbers have the same text.

    Only the order of one credit's uses matters. Without their numbers, which grow forever, the
    number of states is finite.
    """

    def __add__(self, other: int) -> Use:
        return Use(int(self) + other)

    def __repr__(self) -> str:
        return "0"


class Announced(NamedTuple):
    """A segment on its way to the receiver."""

    credit: int
    use: Use


class Acknowledged(NamedTuple):
    """An acknowledgement on its way to the sender; `keeps`: the sender keeps the credit."""

    credit: int
    use: Use
    keeps: bool


class Event(NamedTuple):
    """An event: a method of `World`, and the numbers of its link, credit or staging slot."""

    name: str
    of: int = 0
    credit: int = 0


@dataclass(slots=True)
class Link:
    """A sender, and the messages in flight, the oldest first."""

    sender: SenderCredits
    packing: dict[int, Use] = field(default_factory=dict)
    to_receiver: list[Announced | Return] = field(default_factory=list)
    to_sender: list[Grant | Reclaim | Acknowledged] = field(default_factory=list)


@dataclass(slots=True)
class World:
    """Both halves of all links.

    Attributes:
        busy: largest number of credits that a sender uses at the same time.
        opens, closes: how often links may still open and end; None means no bound.
        own_busy: how many staging slots the own sender uses at the same time; 0: it never starts.
        sends: whether the own sender has links.
        own: staging slots that the own sender uses.
        lent: staging slot -> link that has its credit, until the receiver knows that the credit is
            returned.
        filled: staging slot -> use that is announced and not acknowledged.
        reclaimed: the staging slots of `lent` that the receiver reclaims.
        quarantine: staging slots of links that have ended.
    """

    receiver: StagingSlots
    busy: int
    opens: int | None = None
    closes: int | None = None
    own_busy: int = 0
    sends: bool = False
    own: list[int] = field(default_factory=list)
    links: dict[int, Link] = field(default_factory=dict)
    lent: dict[int, int] = field(default_factory=dict)
    filled: dict[int, Use] = field(default_factory=dict)
    reclaimed: set[int] = field(default_factory=set)
    quarantine: list[list[int]] = field(default_factory=list)

    # Possible events

    def events(self) -> Iterator[Event]:
        """Yield all possible next events."""
        yield from self.deliveries()
        yield from self.completions()
        for number, link in self.links.items():
            if link.sender.idle and len(link.sender.in_use) < self.busy:
                yield Event("take", number)
            if self.closes != 0:
                yield Event("close", number)
        if len(self.links) < self.receiver.num_slots // MIN_CREDITS and self.opens != 0:
            yield Event("open", min({1, 2, 3} - self.links.keys()))
        if self.own_busy:
            yield Event("stop_sending" if self.sends else "start_sending")
        if self.receiver.num_idle and len(self.own) < self.own_busy:
            yield Event("acquire")

    def deliveries(self) -> Iterator[Event]:
        """Yield the messages that may arrive next."""
        for number, link in self.links.items():
            if link.to_receiver:
                yield Event("reach_receiver", number)
            if link.to_sender:
                yield Event("reach_sender", number)

    def completions(self) -> Iterator[Event]:
        """Yield the events that end uses and quarantines."""
        for number, link in self.links.items():
            for credit in link.packing:
                yield Event("announce", number, credit)
        for credit in self.filled:
            yield Event("acknowledge", credit)
        for slot in self.own:
            yield Event("give_back", slot)
        for index in range(len(self.quarantine)):
            yield Event("release", index)

    def happen(self, event: Event) -> None:
        """Execute an event."""
        method = getattr(self, event.name)
        if event.name == "announce":
            method(event.of, event.credit)
        else:
            method(event.of)

    # The own sender

    def start_sending(self, _: int = 0) -> None:
        self.sends = True
        self._send(self.receiver.start_sending())

    def stop_sending(self, _: int = 0) -> None:
        self.sends = False
        self._send(self.receiver.stop_sending())

    def acquire(self, _: int = 0) -> None:
        slot = self.receiver.acquire()
        assert slot not in self.own
        self.own.append(slot)

    def give_back(self, slot: int) -> None:
        self.own.remove(slot)
        self._send(self.receiver.give_back(slot))

    # Another worker's sender

    def take(self, number: int) -> None:
        link = self.links[number]
        credit, use = link.sender.acquire()
        link.packing[credit] = use

    def announce(self, number: int, credit: int) -> None:
        link = self.links[number]
        link.to_receiver.append(Announced(credit, link.packing.pop(credit)))

    def reach_sender(self, number: int) -> None:
        link = self.links[number]
        message = link.to_sender.pop(0)
        if isinstance(message, Grant):
            link.sender.grant(message.credits)
        elif isinstance(message, Acknowledged):
            link.sender.acknowledge(message.credit, message.use)
        else:
            self._answer(link, link.sender.reclaim(message.credit))

    @staticmethod
    def _answer(link: Link, answer: Return | None) -> None:
        if answer is not None:
            link.to_receiver.append(answer)

    # The receiver

    def open(self, number: int) -> None:
        if self.opens is not None:
            self.opens -= 1
        self.links[number] = Link(SenderCredits(uses=dict.fromkeys(range(NUM_CREDITS), Use(0))))
        self._send(self.receiver.open(number))

    def close(self, number: int) -> None:
        if self.closes is not None:
            self.closes -= 1
        del self.links[number]
        slots, messages = self.receiver.close(number)
        assert slots == sorted(slot for slot, link in self.lent.items() if link == number)
        for slot in slots:
            del self.lent[slot]
            self.filled.pop(slot, None)
            self.reclaimed.discard(slot)
        if slots:
            self.quarantine.append(slots)
        self._send(messages)

    def release(self, index: int) -> None:
        self._send(self.receiver.release(self.quarantine.pop(index)))

    def reach_receiver(self, number: int) -> None:
        message = self.links[number].to_receiver.pop(0)
        if isinstance(message, Announced):
            self.receiver.fill(number, message.credit, message.use)
            self.filled[message.credit] = message.use
        else:
            messages = self.receiver.accept_return(number, message.credit)
            self._end_loan(message.credit)
            self._send(messages)

    def acknowledge(self, slot: int) -> None:
        number, use = self.lent[slot], self.filled.pop(slot)
        messages = self.receiver.empty(number, slot)
        keeps = slot not in self.reclaimed
        self.links[number].to_sender.append(Acknowledged(slot, use, keeps))
        if not keeps:
            self._end_loan(slot)
        self._send(messages)

    def _end_loan(self, slot: int) -> None:
        self.reclaimed.remove(slot)
        del self.lent[slot]

    def _send(self, messages: list[tuple[int, Grant | Reclaim]]) -> None:
        for number, message in messages:
            if isinstance(message, Grant):
                assert message.credits, "an empty grant"
                assert not self.lent.keys() & set(message.credits)
                self.lent.update(dict.fromkeys(message.credits, number))
            else:
                assert self.lent[message.credit] == number
                assert message.credit not in self.reclaimed
                self.reclaimed.add(message.credit)
            self.links[number].to_sender.append(message)
        if any(isinstance(message, Reclaim) for _, message in messages):
            assert len(self.reclaimed) <= self.lacking, "more is reclaimed than is lacking"
        self.receiver.has_more = False  # as the own sender does

    # State and invariants

    def key(self) -> str:
        """Return the state that determines all later events."""
        links = [
            (number, link.sender, sorted(link.packing), link.to_receiver, link.to_sender)
            for number, link in sorted(self.links.items())
        ]
        own = f"{self.sends} {sorted(self.own)} {sorted(self.quarantine)}"
        return f"{self.opens} {self.closes} {self.receiver} {links} {own}"

    @property
    def share(self) -> int:
        """Number of staging slots that each link and the own sender should have."""
        usable = self.receiver.num_slots - sum(map(len, self.quarantine))
        users = len(self.links) + self.sends
        return usable // users if users else 0

    @property
    def own_kept(self) -> int:
        """Number of staging slots that the own sender has and may keep."""
        return self.receiver.num_idle + len(self.own) - len(self.own_reclaimed)

    @property
    def own_reclaimed(self) -> list[int]:
        """The staging slots that the own sender uses for the last time."""
        return [slot for slot in self.own if self.receiver._slots[slot].is_reclaimed]

    @property
    def lacking(self) -> int:
        """Number of staging slots that links and the own sender miss from their shares."""
        kept = [*map(self.kept, self.links), *([self.own_kept] if self.sends else [])]
        return sum(max(0, self.share - each) for each in kept)

    def kept(self, number: int) -> int:
        """Return how many staging slots a link has and may keep."""
        return sum(self.lent[s] == number for s in self.lent.keys() - self.reclaimed)

    def check(self) -> None:
        """Check that each staging slot is in one place, and that both halves agree on it."""
        held: list[int] = []
        for number, link in self.links.items():
            mine = self._held(number, link)
            assert sorted(mine) == sorted(s for s, n in self.lent.items() if n == number)
            acks = sum(isinstance(message, Acknowledged) for message in link.to_sender)
            announced = sum(isinstance(message, Announced) for message in link.to_receiver)
            filled = sum(self.lent[slot] == number for slot in self.filled)
            assert len(link.sender.in_use) == len(link.packing) + announced + filled + acks
            held += mine
        quarantined = [slot for slots in self.quarantine for slot in slots]
        assert len({*held, *quarantined, *self.own}) == len(held + quarantined + self.own)
        count, num_slots = self.receiver.count, self.receiver.num_slots
        num_idle, num_own = self.receiver.num_idle, len(self.own)
        assert count(StagingSlotState.FILLED) == len(self.filled) + num_own
        assert count(StagingSlotState.LENT) == len(self.lent) - len(self.filled) + num_idle
        assert count(StagingSlotState.QUARANTINED) == len(quarantined)
        users = len(self.lent) + num_idle + num_own
        assert count(StagingSlotState.FREE) == num_slots - users - len(quarantined)
        assert self.sends or not num_idle, "a sender without links keeps staging slots"

    def _held(self, number: int, link: Link) -> list[int]:
        """Return the staging slots of a link, wherever they are."""
        held = [*link.sender.idle, *link.packing]
        held += [slot for slot in self.filled if self.lent[slot] == number]
        held += [message.credit for message in link.to_receiver]
        for message in link.to_sender:
            if isinstance(message, Grant):
                held += message.credits
            elif isinstance(message, Acknowledged) and message.keeps:
                held.append(message.credit)
        return held
