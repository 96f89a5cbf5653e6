"""Whose turn is next, and who waits how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.base.errors import OverloadedError
from pagewire.shared.base.fair_queue import FairQueue
from pagewire.tests.support.examples import MANY_EXAMPLES


def make(max_items: int = 100, max_each: int = 100) -> FairQueue[str, int]:
    return FairQueue(max_items, max_each)


def drain(queue: FairQueue[str, int]) -> list[tuple[str, int]]:
    """Take everything, one turn after the other."""
    taken = []
    while (turn := queue.pop()) is not None:
        taken.append(turn)
        queue.end_turn(turn[0])
    return taken


def test_owners_take_turns_and_each_gets_its_items_in_order() -> None:
    queue = make()
    for owner, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)]:
        queue.push(owner, item)
    assert len(queue) == 6
    assert drain(queue) == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("b", 6), ("a", 3)]
    assert len(queue) == 0 and queue.pop() is None


def test_one_who_comes_to_a_flood_is_next() -> None:
    queue = make()
    for item in range(50):
        queue.push("flood", item)
    assert queue.pop() == ("flood", 0)
    queue.push("late", 100)
    queue.end_turn("flood")
    assert queue.pop() == ("late", 100)


def test_free_turns_go_to_the_owner_with_the_fewest() -> None:
    queue = make()
    for item in range(5):
        queue.push("a", item)
    assert [queue.pop() for _ in range(3)] == [("a", 0), ("a", 1), ("a", 2)]
    for item in range(5):
        queue.push("b", item)
    assert [queue.pop() for _ in range(3)] == [("b", 0), ("b", 1), ("b", 2)]
    queue.end_turn("b")
    assert queue.pop() == ("b", 3)


def test_owners_that_wait_have_equal_shares() -> None:
    queue = make()
    for item in range(5):
        queue.push("a", item)
    queue.begin_turn("c")  # of which nothing waits
    shares = []
    for _ in range(4):
        shares.append(queue.has_share_left("a", 4))
        queue.pop()
    assert shares == [True] * 4
    assert not queue.has_share_left("a", 4)
    queue.push("b", 1)
    assert queue.has_share_left("b", 4)
    assert queue.has_share_left("a", 9) and not queue.has_share_left("a", 8)


def test_an_item_leaves_the_line_of_its_owner_alone() -> None:
    queue = make()
    for owner in ("a", "b"):
        queue.push(owner, 1)
    queue.push("a", 2)
    queue.remove("a", 1)
    queue.remove("a", 7)
    queue.remove("c", 1)
    assert drain(queue) == [("a", 2), ("b", 1)]


def test_an_item_that_waits_is_not_put_in_again() -> None:
    queue = make(max_items=1)
    queue.push("a", 1)
    queue.push("a", 1)
    assert drain(queue) == [("a", 1)]


def test_bounds_are_of_all_and_of_each() -> None:
    queue = make(max_items=3, max_each=2)
    queue.push("a", 1)
    queue.push("a", 2)
    with pytest.raises(OverloadedError, match="2 items of one owner"):
        queue.push("a", 3)
    queue.push("b", 4)
    with pytest.raises(OverloadedError, match="3 items wait"):
        queue.push("c", 5)
    queue.remove("a", 1)
    queue.push("c", 5)
    assert drain(queue) == [("a", 2), ("b", 4), ("c", 5)]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "remove", "end"]), st.sampled_from("abcd")),
    max_size=60,
)


@MANY_EXAMPLES
@given(EVENTS, st.integers(1, 3), st.data())
def test_whatever_happens_nobody_is_overtaken_twice(
    events: list[tuple[str, str]], slots: int, data: st.DataObject
) -> None:
    """With each slot in use while anything waits, as in a pool of processes."""
    queue, running = make(max_items=20, max_each=10), list[str]()
    waiting: dict[str, list[int]] = {owner: [] for owner in "abcd"}
    had_one: dict[str, list[str]] = {}  # who has had a turn since an owner came without one
    for number, (event, owner) in enumerate(events):
        if event == "push":
            total = sum(map(len, waiting.values()))
            if total == 20 or len(waiting[owner]) == 10:
                with pytest.raises(OverloadedError):
                    queue.push(owner, number)
                continue
            queue.push(owner, number)
            if not waiting[owner] and owner not in running:
                had_one[owner] = list(set(running))
            waiting[owner].append(number)
        elif event == "remove" and waiting[owner]:
            item = data.draw(st.sampled_from(waiting[owner]))
            queue.remove(owner, item)
            waiting[owner].remove(item)
        elif event == "end" and owner in running:
            running.remove(owner)
            queue.end_turn(owner)
        while len(running) < slots and (turn := queue.pop()) is not None:
            owner, item = turn
            assert item == waiting[owner].pop(0)
            assert running.count(owner) <= min(
                running.count(each) for each in "abcd" if waiting[each] or each == owner
            )
            running.append(owner)
            had_one.pop(owner, None)
            for others in had_one.values():
                others.append(owner)
        had_one = {owner: others for owner, others in had_one.items() if waiting[owner]}
        assert all(len(set(others)) == len(others) for others in had_one.values())
        assert len(queue) == sum(map(len, waiting.values()))
        assert len(running) == slots or not len(queue)


def test_what_comes_back_is_first_of_its_owner_and_never_refused() -> None:
    queue = make(max_items=2, max_each=2)
    queue.push("a", 1)
    queue.push("a", 2)
    queue.push_first("a", 3)
    queue.push_first("b", 4)
    assert list(queue) == [3, 1, 2, 4] and len(queue) == 4
    assert drain(queue) == [("a", 3), ("b", 4), ("a", 1), ("a", 2)]


def test_items_are_looked_through_in_the_order_of_their_owners_turns() -> None:
    queue = make()
    for owner, item in [("a", 1), ("a", 2), ("b", 3), ("c", 4)]:
        queue.push(owner, item)
    for owner in ("a", "a", "b"):
        queue.begin_turn(owner)
    assert list(queue) == [4, 3, 1, 2]
    assert [queue.num_turns(owner) for owner in "abcd"] == [2, 1, 0, 0]
    assert [queue.num_waiting(owner) for owner in "abcd"] == [2, 1, 1, 0]


def test_an_owner_has_no_more_turns_at_once_than_it_may() -> None:
    queue: FairQueue[str, int] = FairQueue(max_turns=2)
    for item in range(4):
        queue.push("a", item)
    assert [queue.pop() for _ in range(3)] == [("a", 0), ("a", 1), None]
    queue.push("b", 4)
    assert queue.pop() == ("b", 4)
    assert queue.pop() is None and len(queue) == 2
    queue.end_turn("a")
    assert queue.pop() == ("a", 2)
