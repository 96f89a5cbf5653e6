"""The layer groups of a block: some of its layers each, which can be moved on their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.kernels.kv_staging import max_blocks, packed_bytes
from pagewire.shared.control.protocol import MAX_LAYER_GROUPS, BlockLayout


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How the layers of a model's blocks are divided.

    A block is a row `[L, N, KH, BS, D]` of the pool. Seen as `[NB * count, L / count, N, KH, BS,
    D]`, the pool has a row for each layer group of each block, `block * count + group`: what is
    moved and has a checksum of its own.

    Attributes:
        count: layer groups of a block.
        nbytes: of one layer group.
    """

    count: int
    nbytes: int

    @classmethod
    def of(cls, num_layers: int, block_bytes: int) -> LayerGroups:
        """Return the groups of `num_layers` layers: equal ones, as many as are allowed."""
        count = max(n for n in range(1, MAX_LAYER_GROUPS + 1) if num_layers % n == 0)
        return cls(count, block_bytes // count)

    @classmethod
    def of_layout(cls, layout: BlockLayout) -> LayerGroups:
        """Return those of a worker's blocks; workers whose layouts agree divide them alike."""
        return cls.of(layout.num_layers, layout.block_bytes)

    @property
    def whole(self) -> range:
        """All layer groups of a block."""
        return range(self.count)

    def send_ranges(self) -> list[range]:
        """Return the ranges in which layer groups leave: half of what is left each time.

        Halves are rounded down, and the last range is one layer group. While a step computes one
        range, the one before leaves. Only the last is still to leave when the step ends, so it is
        the smallest; and more ranges would not make the others leave sooner where the wire is much
        faster than the step.
        """
        ranges: list[range] = []
        first = 0
        while first < self.count:
            end = first + max(1, (self.count - first) // 2)
            ranges.append(range(first, end))
            first = end
        return ranges

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.count * self.nbytes

    def packed_bytes(self, num_blocks: int, num_groups: int | None = None) -> int:
        """Return the bytes of staging for a number of blocks, whole or some groups of each."""
        per_block = self.count if num_groups is None else num_groups
        return packed_bytes(num_blocks * per_block, self.nbytes)

    def max_blocks(self, num_bytes: int, num_groups: int | None = None) -> int:
        """Return how many blocks fit a number of bytes of staging, likewise."""
        per_block = self.count if num_groups is None else num_groups
        return max_blocks(num_bytes, self.nbytes) // per_block

    def rows(self, block_ids: Sequence[int], groups: range) -> NDArray[np.int64]:
        """Return the rows of these groups, `[len(block_ids) * len(groups)]`, a block's in a run.

        Those of block -1 are negative, and checked only, as it is.

        By numpy: a large segment has several hundred, and a step waits for the engine's thread.
        """
        blocks = np.asarray(block_ids, dtype=np.int64)[:, None] * self.count
        return (blocks + np.arange(groups.start, groups.stop)).reshape(-1)
