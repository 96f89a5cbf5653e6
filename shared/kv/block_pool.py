"""Who owns each block of the KV pool: reference counts, prefix cache, eviction.

A block is in exactly one of three states, and at every moment

    free + cached + used == total

    free    nobody refers to it and its content means nothing
    cached  nobody refers to it, but its content is known by hash and may be taken up again
    used    at least one sequence refers to it

Cached blocks are evicted least recently used first. Sequences release their blocks last first,
and a block is only registered after a registered parent, so that a parent always leaves the
cache after its children: a cached prefix has no holes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.shared.errors import IntegrityError
from pagewire.shared.kv.block_hash import BlockHash


class CacheListener(Protocol):
    """Hears which hashes enter and leave the cache, for the index in Redis."""

    def added(self, hashes: Sequence[BlockHash]) -> None:
        """Hear of blocks that can be found from now on."""
        ...

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """Hear of blocks that cannot be found any more."""
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
        enable_caching: without it nothing is ever registered.
        listener: hears of every change of the cache's content.
    """

    num_blocks: int
    enable_caching: bool = True
    listener: CacheListener | None = None
    _refs: list[int] = field(init=False)
    _hash_of: list[BlockHash | None] = field(init=False)
    _by_hash: dict[BlockHash, int] = field(init=False, default_factory=dict)
    _free: list[int] = field(init=False)
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._refs = [0] * self.num_blocks
        self._hash_of = [None] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        """Count the blocks in each state."""
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, cached, self.num_blocks - free - cached, self.num_blocks)

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix; takes no reference."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these blocks `acquire` would take out of what is available."""
        return sum(self._refs[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take a reference on blocks that `lookup` found."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take blocks of no content, evicting cached ones if there are too few free.

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
                block, _none = self._cached.popitem(last=False)
                evicted.append(self._unregister(block))
            self._refs[block] = 1
            taken.append(block)
        if evicted and self.listener is not None:
            self.listener.removed(evicted)
        return taken

    def fork(self, blocks: Sequence[int], num_shared: int) -> tuple[list[int], list[int]]:
        """Take the blocks of a sequence for a second one that continues its tokens.

        Args:
            blocks: of the first sequence.
            num_shared: of these are full, so that nobody writes to them any more. Both refer to
                them from now on; of the others the second gets a block of its own each, into
                which the content is to be copied.

        Returns:
            The second sequence's blocks, and those among them that are its own.

        Raises:
            IntegrityError: too few blocks are available for its own; check `num_available` first.
        """
        own = self.allocate(len(blocks) - num_shared)
        shared = list(blocks[:num_shared])
        self.acquire(shared)
        return [*shared, *own], own

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
                    self._cached[block] = None

    def register(
        self, blocks: Sequence[int], hashes: Sequence[BlockHash], start: int, end: int
    ) -> None:
        """Make a sequence's blocks `start .. end - 1` findable by hash; their content is final.

        A block whose hash another block already stands for is left out, and so is what follows
        it: otherwise its children could outlive the cached parent.
        """
        if not self.enable_caching:
            return
        added: list[BlockHash] = []
        for i in range(start, end):
            block, block_hash = blocks[i], hashes[i]
            if self._hash_of[block] is not None:
                continue
            parent_is_cached = i == 0 or self._hash_of[blocks[i - 1]] is not None
            if not parent_is_cached or block_hash in self._by_hash:
                break
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block
            added.append(block_hash)
        if added and self.listener is not None:
            self.listener.added(added)

    def cached_hashes(self) -> list[BlockHash]:
        """All hashes that can be found now, parents before their children."""
        return list(self._by_hash)

    def drop_cache(self) -> None:
        """Forget all cached content that nobody uses, e.g. before a benchmark."""
        dropped = [self._unregister(block) for block in self._cached]
        self._free.extend(self._cached)
        self._cached.clear()
        if dropped and self.listener is not None:
            self.listener.removed(dropped)

    def _unregister(self, block: int) -> BlockHash:
        block_hash = self._hash_of[block]
        if block_hash is None:
            raise IntegrityError(f"block {block} is in the cache without a hash")
        self._hash_of[block] = None
        del self._by_hash[block_hash]
        return block_hash

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
        idle = [*self._free, *self._cached]
        if len(set(idle)) != len(idle) or any(self._refs[block] for block in idle):
            raise IntegrityError("a block is twice in the free lists, or free and used at once")
        used = sum(count > 0 for count in self._refs)
        if len(idle) + used != self.num_blocks:
            raise IntegrityError(
                f"free + cached + used is {len(idle) + used}, not {self.num_blocks}"
            )
        for block_hash, block in self._by_hash.items():
            if self._hash_of[block] != block_hash:
                raise IntegrityError(f"block {block} is indexed under a hash that is not its own")
        if any(self._hash_of[block] is not None for block in self._free):
            raise IntegrityError("a free block still has a hash")
