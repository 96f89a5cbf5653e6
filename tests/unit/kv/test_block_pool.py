from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.kv.block_hash import BlockHash
from pagewire.shared.kv.block_pool import BlockCounts, BlockPool
from pagewire.shared.kv.block_table import BlockTable
from pagewire.tests.support.kv_layouts import kv_layout

PLAIN = kv_layout()
Path = tuple[int, ...]  # what a block and all before it hold, one small integer a block
paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


def hash_of(path: Path) -> BlockHash:
    return BlockHash(bytes(path))


def hashes_of(path: Path) -> list[BlockHash]:
    return [hash_of(path[: i + 1]) for i in range(len(path))]


@dataclass
class Replica:
    """Keeps the set of findable hashes by events alone, as the index in Redis does."""

    known: set[BlockHash] = field(default_factory=set)

    def added(self, hashes: Sequence[BlockHash]) -> None:
        assert hashes
        for block_hash in hashes:
            assert block_hash not in self.known
            self.known.add(block_hash)
            self.check_no_holes()

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        assert hashes
        for block_hash in hashes:
            self.known.remove(block_hash)
            self.check_no_holes()

    def check_no_holes(self) -> None:
        for block_hash in self.known:
            assert len(block_hash) == 1 or block_hash[:-1] in self.known


@dataclass(eq=False)
class Holder:
    """A sequence: its content and its blocks, of which the first `written` are final."""

    path: Path
    blocks: list[int]
    written: int


class PoolMachine(RuleBasedStateMachine):
    """Sequences with few different contents over a pool in which they do not all fit."""

    def __init__(self) -> None:
        super().__init__()
        self.replica = Replica()
        self.pool = BlockPool(12, PLAIN, listener=self.replica, max_retained=5)
        self.holders: list[Holder] = []
        self.content: dict[int, Path] = {}  # block -> what was last written there

    def holder(self, index: int) -> Holder:
        return self.holders[index % len(self.holders)]

    @rule(path=paths)
    def admit(self, path: Path) -> None:
        cached = self.pool.lookup(hashes_of(path)[: len(path) - 1])[0].block_ids
        missing = len(path) - len(cached)
        if missing > self.pool.num_available - self.pool.num_evictable(cached):
            return
        self.pool.acquire(cached)
        blocks = [*cached, *self.pool.allocate(missing)]
        self.holders.append(Holder(path, blocks, written=len(cached)))

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 20), more=st.integers(1, 3))
    def write(self, index: int, more: int) -> None:
        holder = self.holder(index)
        start, end = holder.written, min(holder.written + more, len(holder.blocks))
        for i in range(start, end):
            self.content[holder.blocks[i]] = holder.path[: i + 1]
        holder.written = end
        self.pool.register([BlockTable(holder.blocks)], hashes_of(holder.path), start, end)

    @precondition(lambda self: self.holders and self.pool.num_available)
    @rule(index=st.integers(0, 20), token=st.integers(0, 1))
    def grow(self, index: int, token: int) -> None:
        holder = self.holder(index)
        holder.path = (*holder.path, token)
        holder.blocks.extend(self.pool.allocate(1))

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        holder = self.holder(index)
        self.holders.remove(holder)
        self.pool.release(holder.blocks)

    @rule(path=paths, owner=st.sampled_from("ab"), seconds=st.integers(1, 3))
    def retain(self, path: Path, owner: str, seconds: int) -> None:
        self.pool.retain(owner, hashes_of(path), seconds)

    @rule(seconds=st.integers(0, 2))
    def wait(self, seconds: int) -> None:
        self.pool.advance_to(self.pool.now_s + seconds)

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        assert self.pool.counts().cached == 0

    @rule(excess=st.integers(1, 3))
    def ask_for_too_many(self, excess: int) -> None:
        before = self.pool.counts()
        with pytest.raises(IntegrityError):
            self.pool.allocate(self.pool.num_available + excess)
        assert self.pool.counts() == before

    @invariant()
    def accounting_adds_up(self) -> None:
        references = Counter(block for holder in self.holders for block in holder.blocks)
        self.pool.check_integrity(references)
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.used == counts.total == 12
        assert counts.used == len(references)
        assert self.pool.num_available == counts.free + counts.cached

    @invariant()
    def cache_holds_what_the_events_say(self) -> None:
        assert set(self.pool.cached_hashes()) == self.replica.known

    @invariant()
    def parents_are_listed_before_their_children(self) -> None:
        listed = self.pool.cached_hashes()
        for i, block_hash in enumerate(listed):
            assert len(block_hash) == 1 or block_hash[:-1] in listed[:i]

    @invariant()
    def found_blocks_hold_their_content(self) -> None:
        for block_hash in self.pool.cached_hashes():
            path = tuple(block_hash)
            found = self.pool.lookup(hashes_of(path))[0].block_ids
            assert [self.content[block] for block in found] == [
                path[: i + 1] for i in range(len(path))
            ]


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(stateful_step_count=40)


def fill(pool: BlockPool, path: Path) -> list[int]:
    """Take blocks for a content and register them all."""
    blocks = pool.allocate(len(path))
    pool.register([BlockTable(blocks)], hashes_of(path), 0, len(path))
    return blocks


def test_least_recently_used_prefix_is_evicted_first_and_from_its_end() -> None:
    replica = Replica()
    pool = BlockPool(6, PLAIN, listener=replica)
    for path in ((1, 1), (2, 2), (3, 3)):
        pool.release(fill(pool, path))
    used_again = pool.lookup(hashes_of((1, 1)))[0].block_ids
    pool.acquire(used_again)
    pool.release(used_again)
    pool.allocate(3)
    assert replica.known == {hash_of(path) for path in ((1,), (1, 1), (3,))}


def test_what_is_retained_is_evicted_last_and_in_time_as_everything_else() -> None:
    replica = Replica()
    pool = BlockPool(6, PLAIN, listener=replica, max_retained=4)
    for path in ((1, 1), (2, 2), (3, 3)):
        blocks = fill(pool, path)
        if path == (1, 1):
            pool.retain("key", hashes_of(path), seconds=300)
        pool.release(blocks)
    taken = pool.allocate(3)
    assert replica.known == {hash_of(path) for path in ((1,), (1, 1), (3,))}
    taken += pool.allocate(1)
    assert (pool.num_retained, pool.num_available) == (2, 2)
    taken += pool.allocate(1)
    assert (pool.num_retained, replica.known) == (0, {hash_of((1,))})
    pool.release(taken)
    for path in ((2, 2), (3, 3)):
        pool.release(fill(pool, path))
    pool.retain("key", hashes_of((2, 2)), seconds=300)
    pool.advance_to(299.0)
    assert pool.num_retained == 2
    pool.advance_to(300.0)
    assert pool.num_retained == 0


def test_idle_blocks_that_are_retained_beyond_a_share_are_given_up_at_once() -> None:
    pool = BlockPool(40, PLAIN, max_retained=10)
    long, short = (1,) * 8, (2,) * 5
    for path in (long, short):
        pool.release(fill(pool, path))
    pool.retain("key", hashes_of(long), seconds=3600)
    pool.retain("key", hashes_of(short), seconds=300)
    pool.check_integrity({})
    assert 0 < pool.num_retained <= 10
    assert pool.counts().cached == 13


@pytest.mark.parametrize(("share", "found"), [(24, 20), (22, 18), (6, 3), (1, 0), (0, 0)])
def test_of_a_model_with_a_window_a_beginning_within_the_share_can_be_continued(
    share: int, found: int
) -> None:
    pool = BlockPool(60, kv_layout([None, 4]), max_retained=share)
    path = (1,) * 20
    blocks = pool.allocate(40)
    pool.register([BlockTable(blocks[:20]), BlockTable(blocks[20:])], hashes_of(path), 0, 20)
    pool.retain("key", hashes_of(path), seconds=300)
    pool.release(blocks)
    pool.release(pool.allocate(60 - pool.num_retained))
    assert len(pool.lookup(hashes_of(path))[0]) == found
    assert pool.num_retained == found + min(found, 4) <= share
    pool.check_integrity({})


def test_nothing_that_is_retained_makes_an_allocation_fail() -> None:
    pool = BlockPool(8, PLAIN, max_retained=8)
    for owner, path in enumerate(((1, 1), (2, 2), (3, 3), (4, 4))):
        blocks = fill(pool, path)
        pool.retain(str(owner), hashes_of(path), seconds=86400)
        pool.release(blocks)
    assert pool.num_retained == pool.num_available == 8
    assert len(pool.allocate(8)) == 8
    assert pool.num_retained == 0


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(5, PLAIN)
    pool.release(fill(pool, (1, 2)))
    pool.allocate(3)
    assert pool.counts() == BlockCounts(free=0, cached=2, used=3, total=5)
    pool.allocate(1)
    assert (
        pool.lookup(hashes_of((1, 2)))[0].block_ids
        == pool.lookup(hashes_of((1,)))[0].block_ids
        != []
    )


def test_second_copy_of_a_content_is_not_registered_nor_what_follows_it() -> None:
    pool = BlockPool(8, PLAIN)
    first = fill(pool, (1, 2))
    second = pool.allocate(3)
    pool.register([BlockTable(second)], hashes_of((1, 2, 3)), 0, 3)
    assert pool.lookup(hashes_of((1, 2, 3)))[0].block_ids == first
    pool.release(second)
    assert pool.counts().free == 6


def test_child_of_a_second_copy_is_not_registered_later_either() -> None:
    pool = BlockPool(8, PLAIN)
    first = fill(pool, (1,))
    second = pool.allocate(3)
    for i in range(3):
        pool.register([BlockTable(second)], hashes_of((1, 2, 3)), i, i + 1)
    assert pool.lookup(hashes_of((1, 2, 3)))[0].block_ids == first
    assert pool.cached_hashes() == [hash_of((1,))]


def test_shared_block_stays_in_use_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(4, PLAIN)
    blocks = fill(pool, (1, 2))
    pool.acquire(blocks[:1])
    pool.release(blocks)
    assert pool.counts() == BlockCounts(free=2, cached=1, used=1, total=4)
    assert pool.num_evictable(blocks) == 1
    pool.release(blocks[:1])
    assert pool.counts() == BlockCounts(free=2, cached=2, used=0, total=4)


def test_nothing_is_cached_where_caching_is_off() -> None:
    replica = Replica()
    pool = BlockPool(4, PLAIN, enable_caching=False, listener=replica)
    pool.release(fill(pool, (1, 2)))
    assert pool.counts().free == 4
    assert pool.lookup(hashes_of((1, 2)))[0].block_ids == []
    assert not replica.known


def test_release_without_a_reference_is_an_integrity_error() -> None:
    pool = BlockPool(2, PLAIN)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(IntegrityError, match="more often than taken"):
        pool.release(blocks)


@pytest.mark.parametrize("references", [{}, {0: 2}, {0: 1, 1: 1}], ids=["leak", "double", "alien"])
def test_check_finds_references_that_are_not_accounted_for(references: dict[int, int]) -> None:
    pool = BlockPool(4, PLAIN)
    assert pool.allocate(1) == [0]
    pool.check_integrity({0: 1})
    with pytest.raises(IntegrityError, match="references"):
        pool.check_integrity(references)
