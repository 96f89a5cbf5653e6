"""Sizes of packed KV blocks in staging, and the rows that layer groups have in the pool.

In staging, the parts of all ranks follow each other. Each has its own checksums. Between workers
with different numbers of ranks, a rank of one has several such parts.

A block is a row `[L, N, KH, BS, D]` of the pool. Seen as `[NB * count, L / count, N, KH, BS, D]`,
the pool has a row for each layer group of each block, `block * count + group`: what is moved and
has a checksum of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagewire.kernels import kv_staging
from pagewire.shared.kv.kv_layout import KvLayout

_ALIGNMENT = 256  # bytes to which each rank's part is aligned, for the kernels' speed


def packed_bytes(layout: KvLayout, num_blocks: int, num_groups: int | None = None) -> int:
    """Return the bytes of staging for a number of blocks, whole or some layer groups of each."""
    if layout.ranks > 1:
        return layout.ranks * part_bytes(layout, num_blocks, num_groups)
    return _packed_bytes(layout, num_blocks, num_groups)


def part_bytes(layout: KvLayout, num_blocks: int, num_groups: int | None = None) -> int:
    """Return how many of these bytes the part of each of several ranks has."""
    return -(-_packed_bytes(layout, num_blocks, num_groups) // _ALIGNMENT) * _ALIGNMENT


def _packed_bytes(layout: KvLayout, num_blocks: int, num_groups: int | None) -> int:
    per_block = len(layout.layer_groups) if num_groups is None else num_groups
    return kv_staging.packed_bytes(num_blocks * per_block, layout.layer_group_bytes)


def max_blocks(layout: KvLayout, num_bytes: int, num_groups: int | None = None) -> int:
    """Return how many blocks fit a number of bytes of staging, likewise."""
    if layout.ranks > 1:
        num_bytes = num_bytes // layout.ranks // _ALIGNMENT * _ALIGNMENT
    per_block = len(layout.layer_groups) if num_groups is None else num_groups
    return kv_staging.max_blocks(num_bytes, layout.layer_group_bytes) // per_block


def pool_rows(layout: KvLayout, block_ids: Sequence[int], groups: range) -> NDArray[np.int64]:
    """Return the rows of these layer groups, `[len(block_ids) * len(groups)]`, a block's in a run.

    Those of block -1 are negative, and checked only, as it is.

    By numpy: a large segment has several hundred, and a step waits for the engine's thread.
    """
    blocks = np.asarray(block_ids, dtype=np.int64)[:, None] * len(layout.layer_groups)
    return (blocks + np.arange(groups.start, groups.stop)).reshape(-1)
