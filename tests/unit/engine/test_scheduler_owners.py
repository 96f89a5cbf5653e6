"""Owners take turns at an engine: no owner waits for all answers of another one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from pagewire.shared.base.errors import OverloadedError
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.tests.support.fake_engine import generate, make_core, make_sequence

pytestmark = pytest.mark.usefixtures("each_executor")

NUMBERS = itertools.count()
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])


def flood(core: EngineCore, owner: str, count: int, max_tokens: int = 50) -> list[Sequence]:
    """Add many sequences of an owner."""
    found = [
        make_sequence(f"{owner}{next(NUMBERS)}", [1] * 3, max_tokens=max_tokens, owner=owner)
        for _ in range(count)
    ]
    for sequence in found:
        core.sequences.add(sequence)
    return found


def steps_until_ended(core: EngineCore, sequence: Sequence) -> int:
    for number in range(2000):
        if sequence.is_finished:
            return number
        core.step()
        core.scheduler.table.check_integrity()
    pytest.fail("it does not end")


def running(core: EngineCore) -> Counter[str | None]:
    """Return how many sequences of each owner have a device slot."""
    return Counter(each.spec.owner for each in core.scheduler.table.running)


def step(core: EngineCore, times: int) -> None:
    for _ in range(times):
        core.step()
        core.scheduler.table.check_integrity()


@BOTH
def test_a_flood_delays_the_answer_of_another_owner_by_a_few_steps(overlap: bool) -> None:
    core, _ = make_core(num_blocks=200, max_num_seqs=4, overlap=overlap)
    of_flood = flood(core, "a", 40)
    step(core, 9)
    chat = make_sequence("chat", [2] * 3, max_tokens=4, owner="b")
    core.sequences.add(chat)
    assert steps_until_ended(core, chat) <= 4 + 3
    assert not any(each.is_finished for each in of_flood)
    assert core.scheduler.table.num_preemptions == 1
    expected = [generate(each, 1024) for each in (*of_flood, chat)]
    for each in of_flood:
        steps_until_ended(core, each)
    assert [each.token_ids[3:] for each in (*of_flood, chat)] == expected


def test_two_floods_share_the_slots() -> None:
    core, _ = make_core(num_blocks=200, max_num_seqs=6)
    flood(core, "a", 30, max_tokens=20)
    step(core, 5)
    assert running(core) == {"a": 6}
    flood(core, "b", 30, max_tokens=20)
    step(core, 40)
    assert running(core) == {"a": 3, "b": 3}
    assert core.scheduler.table.num_preemptions == 1


def test_each_owner_that_comes_gets_a_slot_as_long_as_one_has_two() -> None:
    core, _ = make_core(num_blocks=200, max_num_seqs=4)
    flood(core, "a", 30, max_tokens=900)
    step(core, 5)
    for owner in "bcde":
        flood(core, owner, 2, max_tokens=900)
        step(core, 6)
    assert running(core) == dict.fromkeys("abcd", 1)


@BOTH
def test_blocks_are_made_free_for_another_owner(overlap: bool) -> None:
    core, _ = make_core(num_blocks=16, block_size=4, max_num_seqs=16, overlap=overlap)
    flood(core, "a", 12, max_tokens=60)
    step(core, 12)
    preempted = core.scheduler.table.num_preemptions
    chat = make_sequence("chat", [2] * 11, max_tokens=4, owner="b")
    core.sequences.add(chat)
    expected = generate(chat, 1024)
    for _ in range(12):
        step(core, 1)
        if chat.device_slot is not None:
            break
    assert chat.device_slot is not None
    assert core.scheduler.table.num_preemptions > preempted
    steps_until_ended(core, chat)
    assert chat.token_ids[11:] == expected


def test_nobody_gives_way_to_a_prompt_of_more_than_half_of_the_blocks() -> None:
    core, _ = make_core(num_blocks=16, block_size=4, max_num_batched_tokens=64)
    for number in range(3):
        core.sequences.add(make_sequence(f"a{number}", [number] * 13, max_tokens=9, owner="a"))
    step(core, 1)
    core.sequences.add(make_sequence("b", [7] * 36, max_tokens=4, owner="b"))
    step(core, 2)
    assert running(core) == {"a": 3}
    assert core.scheduler.table.num_preemptions == 0


def test_answers_to_one_prompt_take_turns_too() -> None:
    core, _ = make_core(num_blocks=200, max_num_seqs=4)
    parent, *children = [
        make_sequence(f"a{n}", [1] * 3, max_tokens=50, seed=n, owner="a") for n in range(9)
    ]
    core.sequences.add(parent, tuple(children))
    step(core, 8)
    assert running(core) == {"a": 4}
    chat = make_sequence("chat", [2] * 3, max_tokens=4, owner="b")
    core.sequences.add(chat)
    assert steps_until_ended(core, chat) <= 4 + 3
    assert not any(each.is_finished for each in (parent, *children))


@pytest.mark.parametrize("bound", [1, 4, 9])
def test_a_lone_owner_may_fill_the_queue_and_others_still_find_room(bound: int) -> None:
    core, _ = make_core(max_waiting=bound)
    flood(core, "a", bound)
    with pytest.raises(OverloadedError, match=f"{bound} requests are waiting already"):
        flood(core, "a", 1)
    flood(core, "b", max(1, bound // 2))
    with pytest.raises(OverloadedError, match="of this owner"):
        flood(core, "b", bound)
    flood(core, "c", max(1, bound // 4))


def test_what_leaves_early_gives_its_turn_back() -> None:
    core, _ = make_core(num_blocks=200, max_num_seqs=2)
    of_flood = flood(core, "a", 8)
    step(core, 4)
    chats = flood(core, "b", 3)
    core.sequences.abort(chats[0].request_id)
    for each in of_flood[:2]:
        core.sequences.abort(each.request_id)
    step(core, 2)
    assert running(core) == {"a": 1, "b": 1}
    for each in (*of_flood, *chats):
        core.sequences.abort(each.request_id)
    step(core, 2)
    assert len(core.scheduler.table.waiting) == 0
    assert [core.scheduler.table.waiting.num_turns(owner) for owner in "ab"] == [0, 0]
