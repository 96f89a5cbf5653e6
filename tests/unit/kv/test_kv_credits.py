from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator

import pytest

from pagewire.shared.base.errors import IntegrityError, ProtocolError, TransferError
from pagewire.shared.transfer.endpoint.credits import (
    SenderCredits,
    StagingSlots,
    StagingSlotState,
)
from pagewire.shared.transfer.messages import Grant, Reclaim, Return
from pagewire.tests.support.credits_world import Acknowledged, World

Granted = list[tuple[int, Grant | Reclaim]]


def settled(world: World) -> World:
    """Deliver all messages and end all uses, in some order."""
    while event := next(world.deliveries(), None) or next(world.completions(), None):
        world.happen(event)
    return world


def world_of(
    num_slots: int,
    busy: int,
    *before: str,
    opens: int | None,
    closes: int | None,
    own_busy: int = 0,
) -> World:
    """Return a world in which links have opened and closed and nothing is in flight.

    Args:
        before: "+1": link 1 opened, and all was settled; "-1": it ended, and its staging
            slots are in quarantine.
    """
    world = World(StagingSlots(num_slots), busy)
    for step in before:
        if step[0] == "+":
            world.open(int(step[1:]))
            settled(world)
        else:
            world.close(int(step[1:]))
            while event := next(world.deliveries(), None):
                world.happen(event)
    world.opens, world.closes, world.own_busy = opens, closes, own_busy
    return world


# Each state that honest peers can reach


def check_progress(world: World) -> bool:
    """See what must be so where nothing is in flight; returns whether nothing is to be done."""
    if next(world.deliveries(), None) is not None:
        return False
    coming = len(world.reclaimed) + len(world.own_reclaimed)
    assert world.lacking <= coming, "a link waits for credits that nobody gives back"
    for number, link in world.links.items():
        assert world.reclaimed.isdisjoint(link.sender.idle), f"link {number} keeps credits"
    if next(world.completions(), None) is not None:
        return False
    assert not world.reclaimed
    for number, link in world.links.items():
        assert len(link.sender.idle) == world.kept(number) >= world.share
    assert not world.sends or world.receiver.num_idle >= world.share
    return True


def explore(start: World) -> int:
    """Visit all states that can be reached; returns how many.

    Whatever the order of events, those that end something come to an end: the states between which
    they lead form no circle. So all orders lead to states in which nothing is left to be done.
    """
    places = {start.key(): 0}
    todo = deque([start])
    leads_to: list[list[int]] = []  # by what ends something
    num_settled = 0
    while todo:
        world = todo.popleft()
        world.check()
        num_settled += check_progress(world)
        if len(leads_to) % 40 == 0:
            check_dishonest(world)
        data = pickle.dumps(world, -1)
        ends = {*world.deliveries(), *world.completions()}
        leads_to.append([])
        for event in world.events():
            changed: World = pickle.loads(data)  # noqa: S301
            changed.happen(event)
            key = changed.key()
            if key not in places:
                places[key] = len(places)
                todo.append(changed)
            if event in ends:
                leads_to[-1].append(places[key])
    check_no_circle(leads_to)
    assert num_settled > 0
    return len(places)


def check_no_circle(leads_to: list[list[int]]) -> None:
    """See that a graph is free of circles: its nodes can be taken away, those without arrows first.

    Args:
        leads_to: by node, the ends of its arrows.
    """
    arrows = Counter(end for ends in leads_to for end in ends)
    free = [node for node in range(len(leads_to)) if not arrows[node]]
    num_taken = 0
    while free:
        num_taken += 1
        for end in leads_to[free.pop()]:
            arrows[end] -= 1
            if not arrows[end]:
                free.append(end)
    assert num_taken == len(leads_to)


@pytest.mark.parametrize(
    ("world", "at_least"),
    [
        pytest.param(world_of(2, 2, opens=None, closes=None), 30, id="one link, 2 staging slots"),
        pytest.param(world_of(3, 3, opens=None, closes=None), 150, id="one link, 3 staging slots"),
        pytest.param(world_of(4, 1, opens=2, closes=1), 2000, id="two open, one ends"),
        pytest.param(world_of(4, 1, "+1", opens=1, closes=0), 1000, id="one joins another"),
        pytest.param(
            world_of(4, 2, "+1", opens=1, closes=0),
            15_000,
            id="one joins a busy one",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            world_of(3, 1, opens=1, closes=1, own_busy=2), 1000, id="one opens and ends, own sender"
        ),
        pytest.param(
            world_of(3, 1, "+1", opens=0, closes=1, own_busy=3), 400, id="own sender uses all of 3"
        ),
        pytest.param(
            world_of(4, 1, "+1", opens=1, closes=0, own_busy=1),
            50_000,
            id="one joins another and the own sender",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            world_of(5, 1, "+1", "+2", "-1", opens=1, closes=0),
            500,
            id="one joins, 3 of 5 staging slots in quarantine",
        ),
        pytest.param(
            world_of(6, 1, "+1", "+2", "-1", opens=1, closes=0),
            500,
            id="one joins, 3 of 6 staging slots in quarantine",
        ),
        pytest.param(
            world_of(4, 1, "+1", "+2", "-1", "-2", opens=2, closes=0),
            500,
            id="two open, all staging slots in quarantine",
        ),
    ],
)
def test_all_interleavings_keep_every_slot_in_one_place_and_lend_all_evenly(
    world: World, at_least: int
) -> None:
    assert explore(world) >= at_least


@pytest.mark.parametrize("seed", range(4))
def test_long_histories_of_three_links_lose_no_credit(seed: int) -> None:
    rng = random.Random(seed)
    world = world_of(7, 3, opens=None, closes=None, own_busy=4)
    for step in range(10_000):
        # Links end seldom, so that there is something to lose.
        events = [e for e in world.events() if e.name != "close" or rng.random() < 0.02]
        world.happen(rng.choice(events))
        world.check()
        check_progress(world)
        if step % 100 == 0:
            assert check_progress(settled(pickle.loads(pickle.dumps(world))))  # noqa: S301


# Peers that do not keep to the protocol


def check_dishonest(world: World) -> None:
    """See that wrong messages are refused and leave everything as it is."""
    key = world.key()
    for wrong in (*wrong_to_receiver(world), *wrong_to_senders(world)):
        with pytest.raises(ProtocolError):
            wrong()
    assert world.key() == key


def wrong_to_receiver(world: World) -> Iterator[Callable[[], object]]:
    """Yield what a sender might say and must not."""
    receiver = world.receiver
    for number in (1, 2, 3, 4):
        for slot in range(receiver.num_slots + 1):
            is_lent = world.lent.get(slot) == number and slot not in world.filled
            if not is_lent:
                yield lambda n=number, s=slot: receiver.fill(n, s, 1 << 30)
            else:
                yield lambda n=number, s=slot: receiver.fill(n, s, 0)
            if not is_lent or slot not in world.reclaimed:
                yield lambda n=number, s=slot: receiver.accept_return(n, s)


def wrong_to_senders(world: World) -> Iterator[Callable[[], object]]:
    """Yield what a receiver might say and must not."""
    for number, link in world.links.items():
        sender = link.sender
        acks = [message for message in link.to_sender if isinstance(message, Acknowledged)]
        in_use = {*link.packing, *(m.credit for m in link.to_receiver if not isinstance(m, Return))}
        in_use |= {m.credit for m in acks} | {s for s in world.filled if world.lent[s] == number}
        for credit in range(world.receiver.num_slots + 1):
            is_here = credit in in_use or credit in sender.idle
            newest = sender.uses.get(credit, 0)
            if is_here:
                yield lambda s=sender, c=credit: s.grant([c])
                yield lambda s=sender, c=credit: s.grant([99, c])
            else:
                yield lambda s=sender, c=credit: s.grant([c, c])
                yield lambda s=sender, c=credit: s.reclaim(c)
            for use in (newest - 1, newest + 1, *([] if credit in in_use else [newest])):
                yield lambda s=sender, c=credit, u=use: s.acknowledge(c, u)


def lent(num_slots: int = 2) -> tuple[StagingSlots, SenderCredits]:
    """Return a receiver and the only sender, who has all credits."""
    receiver, sender = StagingSlots(num_slots), SenderCredits()
    [(_, grant)] = receiver.open(1)
    sender.grant(grant.credits)
    return receiver, sender


def test_a_use_is_announced_once() -> None:
    receiver, sender = lent()
    credit, use = sender.acquire()
    receiver.fill(1, credit, use)
    with pytest.raises(ProtocolError, match=f"no use {use} of credit {credit}"):
        receiver.fill(1, credit, use)
    receiver.empty(1, credit)
    with pytest.raises(ProtocolError, match=f"no use {use} of credit {credit}"):
        receiver.fill(1, credit, use)
    receiver.fill(1, credit, use + 1)


def test_a_use_is_announced_once_even_if_the_credit_was_elsewhere_since_then() -> None:
    receiver = StagingSlots(4)
    receiver.open(1)
    for credit in range(4):
        receiver.fill(1, credit, 7)
        receiver.empty(1, credit)
    reclaimed = [message.credit for _, message in receiver.open(2)]
    for credit in reclaimed:
        receiver.accept_return(1, credit)
    for credit in reclaimed:
        receiver.fill(2, credit, 1)  # uses of another link are others
    slots, _ = receiver.close(2)
    assert receiver.release(slots) == [(1, Grant(reclaimed))]
    for credit in reclaimed:
        with pytest.raises(ProtocolError, match=f"no use 7 of credit {credit}"):
            receiver.fill(1, credit, 7)
        receiver.fill(1, credit, 8)


def test_a_second_reclaim_of_a_credit_in_use_is_refused() -> None:
    _, sender = lent()
    credit, use = sender.acquire()
    assert sender.reclaim(credit) is None
    with pytest.raises(ProtocolError, match="reclaimed and is not here"):
        sender.reclaim(credit)
    sender.acknowledge(credit, use)
    assert credit not in sender.idle
    assert not sender.in_use


def test_the_credit_that_has_rested_longest_is_taken_first() -> None:
    _, sender = lent(3)
    (first, use), (second, other_use) = sender.acquire(), sender.acquire()
    sender.acknowledge(second, other_use)
    sender.acknowledge(first, use)
    assert [sender.acquire()[0] for _ in range(3)] == [2, second, first]
    assert not sender.idle


def test_a_link_too_many_is_refused_by_name() -> None:
    receiver = StagingSlots(5)
    receiver.check_room(1)
    with pytest.raises(TransferError, match=r"2 KV links are open.*PAGEWIRE_STAGING_SLOTS"):
        receiver.check_room(2)


def test_no_link_opens_while_the_slots_for_it_are_in_quarantine() -> None:
    receiver, _ = lent(4)
    lost, _ = receiver.close(1)
    with pytest.raises(TransferError, match=r"0 KV links are open.* 4 .*, 0 left for links"):
        receiver.check_room(0)
    receiver.release(lost[:1])
    receiver.check_room(0)
    with pytest.raises(TransferError, match=r"1 KV links are open.* 4 .*, 1 left for links"):
        receiver.check_room(1)


def test_a_link_does_not_take_the_last_slot_of_the_own_sender() -> None:
    receiver, _ = lent(4)
    receiver.start_sending()
    lost, _ = receiver.close(1)
    receiver.release(lost[:1])
    assert receiver.num_idle == 1
    with pytest.raises(TransferError, match="0 left for links"):
        receiver.check_room(0)
    receiver.release(lost[1:2])
    receiver.check_room(0)


# The own sender


def test_the_own_sender_has_all_slots_while_nobody_else_needs_one() -> None:
    slots = StagingSlots(3)
    assert slots.num_idle == 0
    assert (slots.start_sending(), slots.num_idle, slots.has_more) == ([], 3, True)
    assert slots.start_sending() == []
    first, second = slots.acquire(), slots.acquire()
    slots.give_back(second)
    slots.give_back(first)
    assert [slots.acquire() for _ in range(3)] == [2, second, first]


def test_a_link_and_the_own_sender_share_the_slots_whoever_comes_first() -> None:
    slots = StagingSlots(4)
    slots.start_sending()
    busy = [slots.acquire() for _ in range(4)]
    assert slots.open(1) == []  # two of them come later
    assert slots.give_back(busy[0]) == [(1, Grant([busy[0]]))]
    assert slots.give_back(busy[1]) == [(1, Grant([busy[1]]))]
    assert slots.give_back(busy[2]) == []
    assert slots.num_idle == 1

    slots = StagingSlots(4)
    slots.open(1)
    assert slots.start_sending() == [(1, Reclaim(0)), (1, Reclaim(1))]
    slots.has_more = False
    assert slots.accept_return(1, 0) == []
    assert (slots.num_idle, slots.has_more) == (1, True)


def test_idle_slots_of_the_own_sender_are_lent_at_once_and_all_when_it_stops() -> None:
    slots = StagingSlots(4)
    slots.start_sending()
    busy = slots.acquire()
    [(_, grant)] = slots.open(1)
    assert isinstance(grant, Grant) and len(grant.credits) == 2 and busy not in grant.credits
    [(_, rest)] = slots.stop_sending()
    assert isinstance(rest, Grant) and len(rest.credits) == 1
    assert slots.give_back(busy) == [(1, Grant([busy]))]
    with pytest.raises(IntegrityError, match="not filled"):
        slots.give_back(busy)


def return_idle(slots: StagingSlots, messages: Granted) -> None:
    """Answer all reclaims: nobody uses a credit."""
    while messages:
        link, message = messages.pop(0)
        if isinstance(message, Reclaim):
            messages += slots.accept_return(link, message.credit)


@pytest.mark.parametrize("num_slots", range(2, 9))
def test_with_as_many_links_as_may_open_the_own_sender_and_each_link_have_a_slot(
    num_slots: int,
) -> None:
    slots, links = StagingSlots(num_slots), 0
    while links < num_slots // 2:
        slots.check_room(links)
        links += 1
        return_idle(slots, slots.open(links))
    with pytest.raises(TransferError, match="KV links are open"):
        slots.check_room(links)
    return_idle(slots, slots.start_sending())
    assert slots.num_idle >= 1
    assert all(len(slots._held(link)) >= 1 for link in range(1, links + 1))


def test_what_the_receiver_itself_gets_wrong_is_an_integrity_error() -> None:
    receiver, _ = lent()
    with pytest.raises(IntegrityError, match="not filled"):
        receiver.empty(1, 0)
    with pytest.raises(IntegrityError, match="not in quarantine"):
        receiver.release([0])
    assert receiver.close(2) == ([], [])  # no link of ours
    slots, messages = receiver.close(1)
    assert (slots, messages) == ([0, 1], [])
    assert receiver.count(StagingSlotState.QUARANTINED) == 2
    assert receiver.release(slots) == []
    with pytest.raises(IntegrityError, match="not in quarantine"):
        receiver.release([0])
