from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagewire.shared.kv.retention import MAX_OWNERS, Retention

Path = tuple[int, ...]
OWNERS = ("a", "b", None)
MAX_BLOCKS = 6

paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def block_of(path: Path) -> int:
    """Return the block of a path in the binary tree of all prompts."""
    return int("1" + "".join(map(str, path)), 2)


def chain_of(path: Path) -> list[int]:
    return [block_of(path[: i + 1]) for i in range(len(path))]


@dataclass
class Told:
    """What an owner was told to retain: chains and their ends, by their last blocks."""

    chains: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)

    @property
    def blocks(self) -> set[int]:
        return {block for chain in self.chains.values() for block in chain}

    def retain(self, chain: list[int], end: float) -> None:
        before, tip = self.blocks, chain[-1]
        if tip not in before:
            known = [block for block in chain if block in before]
            if known and self.ends.get(known[-1], end + 1) <= end:
                self.forget(known[-1])
        self.chains[tip] = chain
        self.ends[tip] = max(end, self.ends.get(tip, end))
        while len(self.blocks) > MAX_BLOCKS:
            self.forget_soonest()

    def forget(self, tip: int) -> None:
        del self.chains[tip], self.ends[tip]

    def forget_soonest(self) -> None:
        self.forget(min(self.ends, key=lambda tip: (self.ends[tip], tip)))


class RetentionMachine(RuleBasedStateMachine):
    """Owners with prompts that share beginnings, against sets of chains."""

    def __init__(self) -> None:
        super().__init__()
        self.retention = Retention(MAX_BLOCKS)
        self.told: dict[str | None, Told] = {}  # in the order in which they began
        self.now_s = 0.0

    def blocks(self) -> set[int]:
        return {block for told in self.told.values() for block in told.blocks}

    def forget_who_has_nothing(self) -> None:
        self.told = {owner: told for owner, told in self.told.items() if told.chains}

    def check_dropped(self, dropped: list[int], before: set[int]) -> None:
        assert set(dropped) == before - self.blocks()
        assert len(set(dropped)) == len(dropped)
        for at, block in enumerate(dropped):
            assert block >> 1 not in dropped[:at], "a parent was given up before its child"

    @rule(owner=st.sampled_from(OWNERS), path=paths, seconds=st.sampled_from([300, 3600]))
    def retain(self, owner: str | None, path: Path, seconds: int) -> None:
        self.now_s += 1 / 1024  # so that no two ends are equal
        before, chain = self.blocks(), chain_of(path)
        dropped = self.retention.retain(owner, chain, seconds, self.now_s)
        self.told.setdefault(owner, Told()).retain(chain, self.now_s + seconds)
        self.check_dropped(dropped, before | set(chain))

    @rule(seconds=st.sampled_from([0, 200, 400, 4000]))
    def wait(self, seconds: int) -> None:
        before = self.blocks()
        self.now_s += seconds
        dropped = self.retention.expire(self.now_s)
        for told in self.told.values():
            for tip in [tip for tip, end in told.ends.items() if end <= self.now_s]:
                told.forget(tip)
        self.forget_who_has_nothing()
        self.check_dropped(dropped, before)

    @rule()
    def make_way(self) -> None:
        before = self.blocks()
        dropped = self.retention.make_way()
        if self.told:
            owner = max(self.told, key=lambda owner: len(self.told[owner].blocks))
            self.told[owner].forget_soonest()
        self.forget_who_has_nothing()
        self.check_dropped(dropped, before)

    @rule()
    def clear(self) -> None:
        self.retention.clear()
        self.told = {}

    @invariant()
    def retains_what_it_was_told(self) -> None:
        assert {block for block in range(64) if block in self.retention} == self.blocks()
        assert len(self.retention) == len(self.blocks())
        for owner in OWNERS:
            own = self.told.get(owner, Told()).blocks
            assert self.retention.num_blocks(owner) == len(own) <= MAX_BLOCKS


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(stateful_step_count=30)


def test_the_next_turn_takes_the_place_of_the_one_before() -> None:
    retention = Retention(4)
    assert retention.retain("a", [1, 2, 3], 300, 0.0) == []
    assert retention.retain("a", [1, 2, 3, 4], 300, 10.0) == []
    assert retention.expire(300.0) == []
    assert retention.expire(310.0) == [4, 3, 2, 1]


def test_of_one_owner_what_ends_soonest_is_given_up_beyond_its_share() -> None:
    retention = Retention(4)
    retention.retain("a", [1, 2], 3600, 0.0)
    retention.retain("a", [3, 4], 300, 10.0)
    assert retention.retain("a", [1, 5], 300, 20.0) == [4, 3]
    assert retention.num_blocks("a") == 3


def test_the_owner_with_most_gives_way_however_long_it_wants_to_retain() -> None:
    retention = Retention(8)
    retention.retain("large", [1, 2, 3], 86400, 0.0)
    retention.retain("small", [4], 300, 0.0)
    assert retention.make_way() == [3, 2, 1]
    assert 4 in retention


def test_a_prompt_beyond_the_share_has_its_beginning_retained() -> None:
    retention = Retention(2)
    assert retention.retain("a", [1, 2, 3], 300, 0.0) == []
    assert [block in retention for block in (1, 2, 3)] == [True, True, False]


def test_what_two_owners_retain_is_given_up_by_the_last_of_them() -> None:
    retention = Retention(2)
    retention.retain("a", [1, 2], 300, 0.0)
    retention.retain("b", [1, 3], 3600, 0.0)
    assert retention.expire(300.0) == [2]
    assert retention.expire(3600.0) == [3, 1]


@pytest.mark.parametrize("share", [0, 3])
def test_nothing_is_retained_without_a_share_or_blocks(share: int) -> None:
    retention = Retention(share)
    assert retention.retain("a", [1] if share == 0 else [], 300, 0.0) == []
    assert len(retention) == 0
    assert retention.make_way() == []


def test_so_many_owners_retain_at_once_and_no_more() -> None:
    retention = Retention(2)
    for number in range(MAX_OWNERS + 3):
        retention.retain(f"address {number}", [2 * number], 300, float(number))
    assert len(retention) == MAX_OWNERS
    retention.retain("address 5", [11], 300, 1e4)
    assert retention.num_blocks("address 5") == 2
    retention.expire(1e4)
    retention.retain("another", [1], 300, 1e4)
    assert retention.num_blocks("another") == 1
