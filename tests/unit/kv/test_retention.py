from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagewire.shared.kv.block_hash import BlockHash
from pagewire.shared.kv.retention import MAX_OWNERS, MAX_SESSIONS, Retention

Path = tuple[int, ...]
OWNERS = ("a", "b", None)
MAX_BLOCKS = 8
WINDOW = 2  # blocks of the second group

paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def block_of(path: Path) -> int:
    """Return the block of a path in the binary tree of all prompts."""
    return int("1" + "".join(map(str, path)), 2)


def hashes_of(path: Path) -> list[BlockHash]:
    return [BlockHash(bytes(path[: i + 1])) for i in range(len(path))]


def blocks_of(path: Path, window: int) -> list[int]:
    """Return a path's blocks in a group without a window, then the last ones of another."""
    chain = [block_of(path[: i + 1]) for i in range(len(path))]
    return [*chain, *(-block for block in chain[max(0, len(chain) - window) :])]


@dataclass
class Told:
    """What an owner was told to retain: until when, by path, what was told last at the end."""

    window: int
    ends: dict[Path, float] = field(default_factory=dict)

    @property
    def blocks(self) -> set[int]:
        return {block for path in self.ends for block in blocks_of(path, self.window)}

    def retain(self, path: Path, end: float) -> None:
        end = max(end, self.ends.get(path, end))
        for known in list(self.ends):
            if path[: len(known)] == known and self.ends[known] <= end:
                del self.ends[known]
        self.ends[path] = end
        while len(self.blocks) > MAX_BLOCKS:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        del self.ends[next(iter(self.ends))]


class RetentionMachine(RuleBasedStateMachine):
    """Owners with prompts that share beginnings, against sets of paths."""

    window = WINDOW

    def __init__(self) -> None:
        super().__init__()
        self.retention = Retention(MAX_BLOCKS)
        self.told: dict[str | None, Told] = {}  # whoever was told last is at the end
        self.now_s = 0.0

    def blocks(self) -> set[int]:
        return {block for told in self.told.values() for block in told.blocks}

    def forget_who_has_nothing(self) -> None:
        self.told = {owner: told for owner, told in self.told.items() if told.ends}

    def check_dropped(self, dropped: list[int], before: set[int]) -> None:
        assert set(dropped) == before - self.blocks()
        assert len(set(dropped)) == len(dropped)
        for at, block in enumerate(dropped):
            assert block < 0 or block >> 1 not in dropped[:at], "a parent before its child"

    @rule(owner=st.sampled_from(OWNERS), path=paths, seconds=st.sampled_from([300, 3600]))
    def retain(self, owner: str | None, path: Path, seconds: int) -> None:
        self.now_s += 2.0
        before, blocks = self.blocks(), blocks_of(path, self.window)
        dropped = self.retention.retain(owner, hashes_of(path), blocks, seconds, self.now_s)
        told = self.told.pop(owner, Told(self.window))
        self.told[owner] = told
        told.retain(path, self.now_s + seconds)
        self.check_dropped(dropped, before | set(blocks))

    @rule(seconds=st.sampled_from([2, 200, 400, 4000]))
    def wait(self, seconds: int) -> None:
        before = self.blocks()
        self.now_s += seconds
        dropped = self.retention.expire(self.now_s)
        for told in self.told.values():
            told.ends = {path: end for path, end in told.ends.items() if end > self.now_s}
        self.forget_who_has_nothing()
        self.check_dropped(dropped, before)

    @rule()
    def release_oldest(self) -> None:
        before = self.blocks()
        dropped = self.retention.release_oldest()
        if self.told:
            owner = max(self.told, key=lambda owner: len(self.told[owner].blocks))
            self.told[owner].forget_oldest()
        self.forget_who_has_nothing()
        self.check_dropped(dropped, before)

    @rule()
    def clear(self) -> None:
        self.retention.clear()
        self.told = {}

    @invariant()
    def retains_what_it_was_told(self) -> None:
        assert {block for block in range(-64, 64) if block in self.retention} == self.blocks()
        assert len(self.retention) == len(self.blocks())
        for owner in OWNERS:
            own = self.told.get(owner, Told(self.window)).blocks
            assert self.retention.num_blocks(owner) == len(own) <= MAX_BLOCKS


class WithoutWindowsMachine(RetentionMachine):
    """The same where a turn's blocks begin with those of the turn before."""

    window = 0


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(stateful_step_count=30)
TestRetentionWithoutWindows = WithoutWindowsMachine.TestCase
TestRetentionWithoutWindows.settings = settings(stateful_step_count=30)


def retain(
    retention: Retention, path: Path, *, owner: str = "a", seconds: int = 300, now_s: float = 0.0
) -> list[int]:
    """Retain a path, whose numbers are its blocks."""
    return retention.retain(owner, hashes_of(path), path, seconds, now_s)


def test_the_next_turn_takes_the_place_of_the_one_before() -> None:
    retention = Retention(4)
    assert retain(retention, (1, 2, 3)) == []
    assert retain(retention, (1, 2, 3, 4), now_s=10.0) == []
    assert retention.expire(300.0) == []
    assert retention.expire(310.0) == [4, 3, 2, 1]


def test_the_next_turn_gives_up_what_only_the_last_turns_window_needed() -> None:
    retention = Retention(100)
    for turn in range(10):
        window = [100 * turn + position for position in range(4)]
        hashes = hashes_of(tuple(range(1, 10 * (turn + 1))))
        retention.retain("a", hashes, window, 300, float(turn))
    assert [block in retention for block in (800, 900, 903)] == [False, True, True]
    assert len(retention) == 4


def test_a_branch_that_begins_before_another_ones_window_is_retained_whole() -> None:
    retention = Retention(100)
    retention.retain("a", hashes_of((1, 2, 3)), [6, 7, 8, 9], 300, 0.0)
    retention.retain("a", hashes_of((1, 2)), [4, 5, 6, 7], 300, 1.0)
    assert all(block in retention for block in range(4, 10))


def test_of_one_owner_what_was_retained_longest_ago_is_given_up_beyond_its_share() -> None:
    retention = Retention(4)
    retain(retention, (1, 2), seconds=86400)
    retain(retention, (3, 4), now_s=10.0)
    assert retain(retention, (5, 6), now_s=20.0) == [2, 1]
    assert retain(retention, (3, 7), now_s=30.0) == [4]
    assert retention.num_blocks("a") == 4


def test_what_is_retained_for_a_day_does_not_end_with_a_turn_that_is_not() -> None:
    retention = Retention(4)
    retain(retention, (1, 2), seconds=86400)
    retain(retention, (1, 2, 3), now_s=10.0)
    assert retention.expire(400.0) == [3]
    assert retain(retention, (1, 2), now_s=400.0) == []
    assert retention.expire(800.0) == []
    assert retention.expire(86400.0) == [2, 1]


def test_the_owner_with_most_gives_way_however_long_it_wants_to_retain() -> None:
    retention = Retention(8)
    retain(retention, (1, 2, 3), owner="large", seconds=86400)
    retain(retention, (4,), owner="small")
    assert retention.release_oldest() == [3, 2, 1]
    assert 4 in retention


def test_what_two_owners_retain_is_given_up_by_the_last_of_them() -> None:
    retention = Retention(2)
    retain(retention, (1, 2))
    retain(retention, (1, 3), owner="b", seconds=3600)
    assert retention.expire(300.0) == [2]
    assert retention.expire(3600.0) == [3, 1]


def test_nothing_gives_way_where_nothing_is_retained() -> None:
    retention = Retention(3)
    assert retention.release_oldest() == retention.expire(1e4) == []
    assert len(retention) == 0


def test_the_owner_that_retained_longest_ago_gives_way_to_one_too_many() -> None:
    retention = Retention(2)
    for number in range(MAX_OWNERS):
        retention.retain(f"address {number}", hashes_of((1,)), [number], 300, float(number))
    retention.retain("address 0", hashes_of((2,)), [MAX_OWNERS], 300, 1e3)
    assert retention.retain("another", hashes_of((1,)), [MAX_OWNERS + 1], 300, 1e3) == [1]
    assert retention.num_blocks("address 0") == 2
    assert len(retention) == MAX_OWNERS + 1


def test_an_owner_has_a_bound_of_sessions_also_if_they_share_their_blocks() -> None:
    retention = Retention(2 * MAX_SESSIONS)
    dropped = []
    for number in range(MAX_SESSIONS + 1):
        hashes = [BlockHash(b"shared"), BlockHash(b"own %d" % number)]
        dropped += retention.retain("a", hashes, [1, 2 + number], 300, float(number))
    assert dropped == [2]
