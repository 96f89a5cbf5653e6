"""The parts of a block: some of its layers each, which can be moved on their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.kernels.kv_staging import max_blocks, packed_bytes
from pagewire.shared.control.protocol import MAX_PARTS, BlockLayout


@dataclass(frozen=True, slots=True)
class BlockParts:
    """How a model's blocks are divided.

    A block is a row `[L, 2, KH, BS, D]` of the pool. Seen as `[NB * count, L / count, 2, KH, BS,
    D]`, the pool has a row for each part of each block, `block * count + part`: what is moved and
    has a checksum of its own.

    Attributes:
        count: parts of a block.
        nbytes: of one part.
    """

    count: int
    nbytes: int

    @classmethod
    def of(cls, num_layers: int, block_bytes: int) -> BlockParts:
        """Return the parts of blocks of `num_layers` layers: equal ones, as many as are allowed."""
        count = max(n for n in range(1, MAX_PARTS + 1) if num_layers % n == 0)
        return cls(count, block_bytes // count)

    @classmethod
    def of_layout(cls, layout: BlockLayout) -> BlockParts:
        """Return the parts of a worker's blocks; workers whose layouts agree divide them alike."""
        return cls.of(layout.num_layers, layout.block_bytes)

    @property
    def whole(self) -> range:
        """All parts of a block."""
        return range(self.count)

    def halvings(self) -> list[range]:
        """Return the parts in the groups in which they leave: half of what is left each time.

        Halves are rounded down, and the last group is one part. While a step computes the layers
        of one group, those of the one before leave. Only the last is still to leave when the step
        ends, so it is the smallest; and more groups would not make the others leave sooner where
        the wire is much faster than the step.
        """
        groups: list[range] = []
        first = 0
        while first < self.count:
            end = first + max(1, (self.count - first) // 2)
            groups.append(range(first, end))
            first = end
        return groups

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.count * self.nbytes

    def packed_bytes(self, num_blocks: int, num_parts: int | None = None) -> int:
        """Return the bytes of staging for a number of blocks, whole or some parts of each."""
        per_block = self.count if num_parts is None else num_parts
        return packed_bytes(num_blocks * per_block, self.nbytes)

    def max_blocks(self, num_bytes: int, num_parts: int | None = None) -> int:
        """Return how many blocks fit a number of bytes of staging, likewise."""
        per_block = self.count if num_parts is None else num_parts
        return max_blocks(num_bytes, self.nbytes) // per_block

    def rows(self, block_ids: Sequence[int], parts: range) -> NDArray[np.int64]:
        """Return the rows of these parts, `[len(block_ids) * len(parts)]`, a block's in a run.

        Those of block -1 are negative, and checked only, as it is.

        By numpy: a large segment has several hundred, and a step waits for the engine's thread.
        """
        blocks = np.asarray(block_ids, dtype=np.int64)[:, None] * self.count
        return (blocks + np.arange(parts.start, parts.stop)).reshape(-1)
