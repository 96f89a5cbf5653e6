"""Allocates the blocks of the KV pool: reference counts, prefix cache, eviction.

A block is in exactly one of three states, and at every moment

    free + cached + used == total

    free    no sequence refers to it, and its content means nothing
    cached  no sequence refers to it, but its content can be found by its hash and used again
    used    at least one sequence refers to it

Cached blocks are evicted least recently used first, and those that owners retain after all others
(retention.py). A sequence releases its last block first, and
in a group without a window a block is registered only after its parent. So a parent always leaves
the cache after its children, and a cached prefix has no holes. In a group with a window, holes are
normal: a prefix can be used again if the last blocks, which the window covers, are cached.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.kv.block_hash import BlockHash
from pagewire.shared.kv.block_table import NO_BLOCK, BlockTable
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.kv.retention import Retention


class CacheListener(Protocol):
    """Is notified of hashes that enter and leave the cache, for the index in Redis.

    A hash is in the cache while all groups have a block for it.
    """

    def added(self, hashes: Sequence[BlockHash]) -> None:
        """Handle that blocks can be found from now on."""
        ...

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """Handle that blocks cannot be found any more."""
        ...


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state."""

    free: int
    cached: int
    used: int
    total: int


@dataclass(slots=True)
class BlockPool:
    """Block ids `0 .. num_blocks - 1`, their reference counts and the prefix cache.

    Attributes:
        num_blocks: size of the pool.
        layout: its cache groups all take blocks from this pool.
        enable_caching: if false, no block is registered.
        listener: notified of each change of the cache's content.
        max_retained: blocks that one owner may retain.
        now_s: the time that `advance_to` was given last.
    """

    num_blocks: int
    layout: KvLayout
    enable_caching: bool = True
    listener: CacheListener | None = None
    max_retained: int = 0
    now_s: float = 0.0
    _refs: list[int] = field(init=False)
    _hash_of: list[BlockHash | None] = field(init=False)
    _group_of: list[int] = field(init=False)  # cache group of each block that has a hash
    _by_hash: list[dict[BlockHash, int]] = field(init=False)  # for each cache group
    _free: list[int] = field(init=False)
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)
    _cached_retained: dict[int, None] = field(init=False, default_factory=dict)
    _retention: Retention = field(init=False)

    def __post_init__(self) -> None:
        self._refs = [0] * self.num_blocks
        self._hash_of = [None] * self.num_blocks
        self._group_of = [0] * self.num_blocks
        self._by_hash = [{} for _ in self.layout.groups]
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._retention = Retention(self.max_retained)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return now."""
        return len(self._free) + len(self._cached) + len(self._cached_retained)

    @property
    def num_retained(self) -> int:
        """Blocks that owners retain, in use or not."""
        return len(self._retention)

    def counts(self) -> BlockCounts:
        """Count the blocks in each state."""
        free, cached = len(self._free), len(self._cached) + len(self._cached_retained)
        return BlockCounts(free, cached, self.num_blocks - free - cached, self.num_blocks)

    def lookup(self, hashes: Sequence[BlockHash]) -> list[BlockTable]:
        """Return the blocks of the longest usable prefix; takes no reference.

        Returns:
            A table for each group, all equally long.
        """
        count = len(hashes)
        for group, by_hash in zip(self.layout.groups, self._by_hash, strict=True):
            if group.window is None:
                count = run_length(by_hash, hashes[:count])
        if self.layout.has_windows:
            count = self._resumable_end(hashes[:count])
        tables = []
        for number, by_hash in enumerate(self._by_hash):
            first = self.layout.first_block(number, count * self.layout.block_size)
            blocks = [by_hash[block_hash] for block_hash in hashes[first:count]]
            tables.append(BlockTable([NO_BLOCK] * first + blocks, first))
        return tables

    def _resumable_end(self, hashes: Sequence[BlockHash]) -> int:
        """Return the longest prefix at whose end each window's blocks are cached."""
        runs = [
            (number, _runs(self._by_hash[number], hashes))
            for number, group in enumerate(self.layout.groups)
            if group.window is not None
        ]
        size = self.layout.block_size
        for end in range(len(hashes), 0, -1):
            if all(run[end - 1] >= end - self.layout.first_block(n, end * size) for n, run in runs):
                return end
        return 0

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `acquire` would remove from the available ones."""
        return sum(self._refs[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take a reference on blocks that `lookup` found."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cache_of(block)[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take free blocks, and evict cached ones if there are too few.

        Raises:
            IntegrityError: fewer than `count` are available; check `num_available` first.
        """
        if count > self.num_available:
            raise IntegrityError(f"{count} blocks asked for, {self.num_available} available")
        evicted: list[BlockHash] = []
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                while not self._cached and self.num_retained:
                    self._give_up(self._retention.release_oldest())
                block, _none = self._cached.popitem(last=False)
                self._unregister(block, evicted)
            self._refs[block] = 1
            taken.append(block)
        if evicted and self.listener is not None:
            self.listener.removed(evicted)
        return taken

    def fork(
        self, tables: Sequence[BlockTable], num_blocks: int, num_shared: int
    ) -> tuple[list[BlockTable], list[tuple[int, int]]]:
        """Take the blocks of a sequence for a second one that continues its tokens.

        Args:
            tables: the first sequence's tables.
            num_blocks: number of block positions of the second sequence.
            num_shared: how many of these positions have full blocks, to which nothing is written
                any more. Both sequences refer to these blocks. For the other positions, the second
                sequence gets new blocks, into which the content must be copied.

        Returns:
            The second sequence's tables, and pairs (from, to) of the blocks to copy.

        Raises:
            IntegrityError: too few blocks are available; check `num_available` first.
        """
        num_own = num_blocks - num_shared
        own = self.allocate(num_own * len(tables))
        forked, copies = [], []
        for number, table in enumerate(tables):
            mine = own[number * num_own : (number + 1) * num_own]
            shared = table.block_ids[:num_shared]
            self.acquire(shared[table.first :])
            copies += list(zip(table.block_ids[num_shared:num_blocks], mine, strict=True))
            forked.append(BlockTable([*shared, *mine], table.first))
        return forked, copies

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each of a sequence's blocks, given in the sequence's order."""
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise IntegrityError(f"block {block} was released more often than taken")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cache_of(block)[block] = None

    def _cache_of(self, block: int) -> dict[int, None]:
        """Return where a block is while no sequence refers to it."""
        return self._cached_retained if block in self._retention else self._cached

    def retain(self, owner: str | None, hashes: Sequence[BlockHash], seconds: int) -> None:
        """Have an owner retain what is cached of a prompt and its answer, from now on.

        Args:
            owner: who retains it; nobody retains more than `max_retained` blocks.
            hashes: of the full blocks, in order. The first ones count if they are too many.
            seconds: for how long.
        """
        size, layout = self.layout.block_size, self.layout
        ends = range(1, len(hashes) + 1)
        fits = bisect.bisect_right(
            ends, self.max_retained, key=lambda end: layout.held_blocks(end * size)
        )
        tables = self.lookup(hashes[:fits])
        retained = hashes[: len(tables[0])]
        if not retained:
            return
        blocks = [block for table in tables for block in table.held]
        given_up = self._retention.retain(owner, retained, blocks, seconds, self.now_s)
        idle = [block for block in reversed(blocks) if not self._refs[block]]
        for block in idle:  # before others, or some of them, are given up
            self._cached.pop(block, None)
            self._cached_retained.pop(block, None)
            self._cached_retained[block] = None
        self._give_up(given_up)

    def advance_to(self, now_s: float) -> None:
        """Note the time: what was retained until now is retained no longer."""
        self.now_s = now_s
        self._give_up(self._retention.expire(now_s))

    def _give_up(self, blocks: Iterable[int]) -> None:
        """Let blocks be evicted as others, as if they had just been used.

        So a parent still leaves the cache after those of its children that nobody retained.
        """
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached_retained[block]
                self._cached[block] = None

    def register(
        self, tables: Sequence[BlockTable], hashes: Sequence[BlockHash], start: int, end: int
    ) -> None:
        """Make a sequence's blocks `start .. end - 1` findable by hash; their content is final.

        A block is left out if another block is already cached under its hash. In a group without a
        window, the blocks after it are left out, too: otherwise a child could stay in the cache
        longer than the cached parent.
        """
        if not self.enable_caching:
            return
        added: list[BlockHash] = []
        for number, table in enumerate(tables):
            self._register_group(number, table, hashes, start, end, added)
        if added and self.listener is not None:
            self.listener.added(added)

    def _register_group(
        self,
        number: int,
        table: BlockTable,
        hashes: Sequence[BlockHash],
        start: int,
        end: int,
        added: list[BlockHash],
    ) -> None:
        """Register one group's blocks; append to `added` the hashes that all groups now have."""
        by_hash, blocks = self._by_hash[number], table.block_ids
        has_window = self.layout.groups[number].window is not None
        for i in range(max(start, table.first), end):
            block, block_hash = blocks[i], hashes[i]
            if self._hash_of[block] is not None:
                continue
            if block_hash in by_hash:
                if has_window:
                    continue
                break
            if not has_window and i > 0 and self._hash_of[blocks[i - 1]] is None:
                break
            self._hash_of[block], self._group_of[block] = block_hash, number
            by_hash[block_hash] = block
            if self._is_complete(block_hash):
                added.append(block_hash)

    def _is_complete(self, block_hash: BlockHash) -> bool:
        """Whether all groups have a block for a hash."""
        if len(self._by_hash) == 1:
            return block_hash in self._by_hash[0]
        return all(block_hash in by_hash for by_hash in self._by_hash)

    def cached_hashes(self) -> list[BlockHash]:
        """Return the hashes that all groups have now, in one group's order; from any thread."""
        hashes = list(self._by_hash[0])  # parents before their children, if it has no window
        return hashes if len(self._by_hash) == 1 else [h for h in hashes if self._is_complete(h)]

    def drop_cache(self) -> None:
        """Evict all cached blocks that are not in use, e.g. before a benchmark."""
        dropped: list[BlockHash] = []
        self._retention.clear()
        self._cached.update(self._cached_retained)
        self._cached_retained.clear()
        for block in self._cached:
            self._unregister(block, dropped)
        self._free.extend(self._cached)
        self._cached.clear()
        if dropped and self.listener is not None:
            self.listener.removed(dropped)

    def _unregister(self, block: int, removed: list[BlockHash]) -> None:
        """Forget a block's hash; append it to `removed` if all groups had it until now."""
        block_hash = self._hash_of[block]
        if block_hash is None:
            raise IntegrityError(f"block {block} is in the cache without a hash")
        if self._is_complete(block_hash):
            removed.append(block_hash)
        self._hash_of[block] = None
        del self._by_hash[self._group_of[block]][block_hash]

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """Check that every block is accounted for.

        Args:
            references: block id -> how many live sequences refer to it.

        Raises:
            IntegrityError: says which block does not add up.
        """
        for block in range(self.num_blocks):
            if self._refs[block] != references.get(block, 0):
                raise IntegrityError(
                    f"block {block} has {self._refs[block]} references, "
                    f"{references.get(block, 0)} are accounted for"
                )
        idle = [*self._free, *self._cached, *self._cached_retained]
        if len(set(idle)) != len(idle) or any(self._refs[block] for block in idle):
            raise IntegrityError("a block is twice in the free lists, or free and used at once")
        used = sum(count > 0 for count in self._refs)
        if len(idle) + used != self.num_blocks:
            raise IntegrityError(
                f"free + cached + used is {len(idle) + used}, not {self.num_blocks}"
            )
        for number, by_hash in enumerate(self._by_hash):
            for block_hash, block in by_hash.items():
                if self._hash_of[block] != block_hash or self._group_of[block] != number:
                    raise IntegrityError(
                        f"block {block} is indexed under a hash or a group that is not its own"
                    )
        if any(
            block not in self._cache_of(block) for block in (*self._cached, *self._cached_retained)
        ):
            raise IntegrityError("a block is cached as one that is retained, or the reverse")
        if any(self._hash_of[block] is not None for block in self._free):
            raise IntegrityError("a free block still has a hash")


def run_length(known: Container[BlockHash], hashes: Sequence[BlockHash]) -> int:
    """Return how many of the first hashes are known, without a gap."""
    for index, block_hash in enumerate(hashes):
        if block_hash not in known:
            return index
    return len(hashes)


def _runs(by_hash: Mapping[BlockHash, int], hashes: Sequence[BlockHash]) -> list[int]:
    """Return, for each hash, how many in a row up to it have a block."""
    runs, length = [], 0
    for block_hash in hashes:
        length = length + 1 if block_hash in by_hash else 0
        runs.append(length)
    return runs
