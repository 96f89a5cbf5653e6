"""The cache groups of a model: layers whose KV of a position is kept or dropped together.

Layers that attend to everything keep the KV of all positions; layers with a sliding window need
only the last ones. A block holds `block_size` positions of one group's layers. All groups have
equally many layers, so that all blocks are of one size and come from one pool:

    layer      0  1  2  3  4  5            group 0: full,        layers 2, 5
    window     W  W  -  W  W  -    -->     group 1: window of W, layers 0, 3
                                           group 2: window of W, layers 1, 4

If the layers of a kind do not divide evenly, the last rows of a group's blocks stay empty. vLLM's
hybrid KV cache manager also shares one pool among groups of equally many layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pagewire.shared.kv.block_table import BlockTable


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers of one group.

    Attributes:
        layers: their numbers in the model, ascending; layer `layers[i]` has row i of a block.
        window: a query at position p reads positions p - window + 1 to p; None: all up to p.
    """

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class CacheGroups:
    """All groups of a model, those without a window first.

    Attributes:
        groups: at least one.
        layers_per_block: rows of a block.
        block_size: positions of a block.
    """

    groups: tuple[CacheGroup, ...]
    layers_per_block: int
    block_size: int

    @classmethod
    def of(cls, windows: Sequence[int | None], block_size: int) -> CacheGroups:
        """Return the groups of a model.

        Args:
            windows: of each layer, None where it attends to everything.
            block_size: positions of a block.
        """
        by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(windows):
            by_window.setdefault(window, []).append(layer)
        rows = _layers_per_block({window: len(layers) for window, layers in by_window.items()})
        kinds = sorted(by_window.items(), key=lambda item: (item[0] is not None, item[0] or 0))
        groups = []
        for window, layers in kinds:
            # In turn, so that the first rows of all groups are done early in a step.
            count = -(-len(layers) // rows)
            groups += [CacheGroup(tuple(layers[n::count]), window) for n in range(count)]
        return cls(tuple(groups), rows, block_size)

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def is_plain(self) -> bool:
        """Whether there is one group, and it attends to everything."""
        return len(self.groups) == 1 and not self.has_windows

    @cached_property
    def has_windows(self) -> bool:
        """Whether some group drops blocks."""
        return any(group.window is not None for group in self.groups)

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The group of each layer, and its row in that group's blocks."""
        places = {
            layer: (number, row)
            for number, group in enumerate(self.groups)
            for row, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(len(places)))

    def last_layers(self, num_layer_groups: int) -> list[int]:
        """Return, for each layer group of a step's blocks, the layer after which it is final."""
        rows = self.layers_per_block // num_layer_groups
        return [
            max(layer for group in self.groups for layer in group.layers[:end])
            for end in range(rows, self.layers_per_block + 1, rows)
        ]

    @cached_property
    def resume_blocks(self) -> int:
        """How many of a prefix's last blocks must be cached in all groups to continue after it.

        0 means all blocks, because no group has a window. Earlier blocks of groups without a window
        are cached as well, because a parent leaves the cache after its children.
        """
        windows = [group.window for group in self.groups if group.window is not None]
        return max((self.blocks_for(window) for window in windows), default=0)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of one group a number of positions needs."""
        return -(-num_tokens // self.block_size)

    def first_block(self, group: int, num_tokens: int) -> int:
        """Return the first block of a group that is read after `num_tokens` tokens.

        The last of these tokens may run again, in each sequence that forks there.
        """
        window = self.groups[group].window
        return 0 if window is None else max(0, num_tokens - window) // self.block_size

    def first_blocks(self, num_tokens: int) -> list[int]:
        """Return `first_block` of each group."""
        return [self.first_block(group, num_tokens) for group in range(len(self.groups))]

    def most_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks that a sequence holds at once.

        Args:
            num_tokens: length of the sequence.
            max_chunk: most tokens of a step. The blocks of two steps are held in full, because one
                step may be scheduled while the other runs.
        """
        total = 0
        for group in self.groups:
            most = self.blocks_for(num_tokens)
            if group.window is not None:
                most = min(most, self.blocks_for(group.window + 2 * max_chunk) + 2)
            total += most
        return total

    def held_blocks(self, num_tokens: int) -> int:
        """Return the blocks that a sequence of `num_tokens` holds between two steps."""
        needed = self.blocks_for(num_tokens)
        return sum(needed - first for first in self.first_blocks(num_tokens))

    def longest_sequence(self, num_blocks: int, max_chunk: int) -> int:
        """Most tokens of a sequence that a pool of this size holds, in full blocks."""
        if self.is_plain:
            return num_blocks * self.block_size
        low, high = 0, num_blocks  # in blocks of one group
        if all(group.window is not None for group in self.groups):
            high = max(high, 1 << 32)
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle * self.block_size, max_chunk) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    # The blocks of a prefill job: what another worker needs to go on after a prompt

    def job_blocks(self, tables: Sequence[BlockTable], num_tokens: int) -> list[int]:
        """Return a prompt's blocks in the order in which jobs number them: by position, then group.

        Args:
            tables: the sequence's tables, one for each group.
            num_tokens: length of the prompt. Blocks that no later token reads are left out.
        """
        return self.job_range(tables, 0, self.blocks_for(num_tokens), num_tokens)

    def job_range(
        self, tables: Sequence[BlockTable], start: int, end: int, num_tokens: int
    ) -> list[int]:
        """Return the job's blocks at block positions `start .. end - 1`."""
        if len(tables) == 1:
            return tables[0].block_ids[max(start, self.first_block(0, num_tokens)) : end]
        firsts = self.first_blocks(num_tokens)
        return [
            table.block_ids[position]
            for position in range(start, end)
            for table, first in zip(tables, firsts, strict=True)
            if position >= first
        ]

    def job_index(self, position: int, num_tokens: int) -> int:
        """Return how many of a job's blocks come before a block position."""
        return sum(max(0, position - first) for first in self.first_blocks(num_tokens))

    def num_job_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a prompt's job has."""
        return self.job_index(self.blocks_for(num_tokens), num_tokens)


def _layers_per_block(counts: Mapping[int | None, int]) -> int:
    """Return the number of rows of a block: the largest one that leaves few rows empty.

    Empty rows cost most in layers without a window, which keep every position.

    Args:
        counts: window -> layers that have it.
    """
    total, full = sum(counts.values()), counts.get(None, 0)

    def is_dense(rows: int) -> bool:
        empty = sum(-count % rows for count in counts.values())
        return 8 * (-full % rows) <= full and 4 * empty <= total

    return max(rows for rows in range(1, min(counts.values()) + 1) if is_dense(rows))
