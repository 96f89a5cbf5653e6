"""The layout of a worker's KV blocks, by which two workers can exchange them.

Layers that attend to everything keep the KV of all positions; layers with a sliding window need
only the last ones. So layers are divided into cache groups, which keep or drop the KV of a position
together. A block holds `block_size` positions of one group's layers. All groups have equally many
layers, so that all blocks are of one size and come from one pool:

    layer      0  1  2  3  4  5            group 0: full,        layers 2, 5
    window     W  W  -  W  W  -    -->     group 1: window of W, layers 0, 3
                                           group 2: window of W, layers 1, 4

If the layers of a kind do not divide evenly, the last rows of a group's blocks stay empty. vLLM's
hybrid KV cache manager also shares one pool among groups of equally many layers.

Across the cache groups, a few consecutive rows of a block are a layer group: it can be moved on its
own, as soon as a step has computed its layers.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from pagewire.shared.kv.block_table import BlockTable
from pagewire.shared.kv.model_identity import DtypeName, Tokens

MAX_LAYER_GROUPS = 8  # layer groups of a block
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

_MAX_LAYERS = 4096
_Number = Annotated[int, Meta(ge=1, le=4096)]


class CachedToken(msgspec.Struct, frozen=True):
    """The numbers that a layer caches of a token: components of equal size, each `[heads, size]`.

    Attributes:
        components: two, keys and values; or one, if attention makes both of one latent vector.
        heads: number of heads of each component.
        size: size of each head.
    """

    components: Annotated[int, Meta(ge=1, le=2)]
    heads: _Number
    size: _Number


class CacheGroup(msgspec.Struct, frozen=True):
    """The layers of one group.

    Attributes:
        layers: their numbers in the model, ascending; layer `layers[i]` has row i of a block.
        window: a query at position p reads positions p - window + 1 to p; None: all up to p.
    """

    layers: Annotated[tuple[int, ...], Meta(max_length=_MAX_LAYERS)]
    window: int | None = None


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The parts of a KV block, and the cache groups whose blocks share a pool.

    Layouts may be equal although the models are not (see `ModelIdentity`).

    Attributes:
        ranks: number of processes that compute the model together. Each has such blocks, with its
            part of the heads, in a pool of its own; all move together.
        dtype: of the numbers, as torch names it without the prefix.
        block_size: positions of a block.
        layers_per_block: rows of a block.
        token: what a layer caches of a token.
        groups: the cache groups, at least one; those without a window come first.
    """

    ranks: _Number = 1
    dtype: DtypeName
    block_size: Tokens
    layers_per_block: _Number
    token: CachedToken
    groups: Annotated[tuple[CacheGroup, ...], Meta(min_length=1, max_length=_MAX_LAYERS)]

    @classmethod
    def of(
        cls, windows: Sequence[int | None], token: CachedToken, block_size: int, dtype: str
    ) -> KvLayout:
        """Return the layout of a model's blocks.

        Args:
            windows: of each layer, None where it attends to everything.
            token: what each layer caches of a token.
            block_size: positions of a block.
            dtype: name of the numbers' dtype.
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
        return cls(
            dtype=dtype,
            block_size=block_size,
            layers_per_block=rows,
            token=token,
            groups=tuple(groups),
        )

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape `[L, N, KH, BS, D]` of a block, a contiguous row of the pool.

        So transfer, swap and checksum are row copies. Heads come before tokens: a head's tokens of
        a block are contiguous. There are N components of a token.
        """
        token = self.token
        return self.layers_per_block, token.components, token.heads, self.block_size, token.size

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block of one rank."""
        return math.prod(self.block_shape) * _ITEM_BYTES[self.dtype]

    @property
    def on_one_rank(self) -> KvLayout:
        """The layout with the heads of all ranks on one."""
        return self._with_ranks(1)

    def divided(self, ranks: int) -> KvLayout | None:
        """Return the layout with the heads of all ranks on this many, if these can share them."""
        return None if self.ranks * self.token.heads % ranks else self._with_ranks(ranks)

    def shares_heads_like(self, other: KvLayout) -> bool:
        """Whether the parts of these ranks make those of another worker's ranks.

        If a model has fewer KV heads than ranks, several ranks have the same one.
        """
        return self.ranks == other.ranks or self.on_one_rank.token == other.on_one_rank.token

    def _with_ranks(self, ranks: int) -> KvLayout:
        heads = self.ranks * self.token.heads // ranks
        token = msgspec.structs.replace(self.token, heads=heads)
        return msgspec.structs.replace(self, ranks=ranks, token=token)

    # The layer groups of a block, which are moved and have a checksum each

    @cached_property
    def layer_groups(self) -> range:
        """The layer groups of a block: equal ones, as many as are allowed."""
        allowed = range(1, MAX_LAYER_GROUPS + 1)
        return range(max(n for n in allowed if self.layers_per_block % n == 0))

    @property
    def layer_group_bytes(self) -> int:
        """Bytes of one layer group of a block."""
        return self.block_bytes // len(self.layer_groups)

    def send_ranges(self) -> list[range]:
        """Return the ranges in which layer groups leave: half of what is left each time.

        Halves are rounded down, and the last range is one layer group. While a step computes one
        range, the one before leaves. Only the last is still to leave when the step ends, so it is
        the smallest; and more ranges would not make the others leave sooner where the wire is much
        faster than the step.
        """
        ranges: list[range] = []
        left = self.layer_groups
        while left:
            half = max(1, len(left) // 2)
            ranges.append(left[:half])
            left = left[half:]
        return ranges

    def last_layers(self) -> list[int]:
        """Return, for each layer group of a step's blocks, the layer after which it is final."""
        rows = self.layers_per_block // len(self.layer_groups)
        return [
            max(layer for group in self.groups for layer in group.layers[:end])
            for end in range(rows, self.layers_per_block + 1, rows)
        ]

    # The cache groups, and the blocks that a sequence has in them

    @cached_property
    def has_windows(self) -> bool:
        """Whether some group drops blocks; otherwise there is only one."""
        return any(group.window is not None for group in self.groups)

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The group of each layer, and its row in that group's blocks."""
        places = {
            layer: (number, row)
            for number, group in enumerate(self.groups)
            for row, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(len(places)))

    @property
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
        """Return for each group the first block that is still needed."""
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
        """Return the blocks that a sequence of `num_tokens` holds between two steps.

        A prefill job of a prompt of this length has as many.
        """
        return self.job_index(self.blocks_for(num_tokens), num_tokens)

    def longest_sequence(self, num_blocks: int, max_chunk: int) -> int:
        """Most tokens of a sequence that a pool of this size holds, in full blocks."""

        def most_blocks(end: int) -> int:
            return self.most_blocks(end * self.block_size, max_chunk)

        is_bounded = any(group.window is None for group in self.groups)
        ends = range(1, 1 + (num_blocks if is_bounded else 1 << 32))  # in blocks of one group
        return bisect.bisect_right(ends, num_blocks, key=most_blocks) * self.block_size

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
