"""The layout of packed KV blocks in staging, and of copy lists.

Staging holds the blocks, then an int64 sum of each. A copy list is int64 `[2 + capacity]`: the
number of blocks, the seed of their sums, their ids, and padding. A block here is a row of the given
pool; the engine's pools have a row for each layer group of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagewire.kernels.errors import UnsupportedShapeError

_CHECKSUM_BYTES = 8
_HEAD_WORDS = 2


def packed_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return the size of packed blocks in staging, in bytes."""
    return num_blocks * (block_bytes + _CHECKSUM_BYTES)


def max_blocks(num_bytes: int, block_bytes: int) -> int:
    """Return how many packed blocks fit into this many bytes of staging."""
    return num_bytes // (block_bytes + _CHECKSUM_BYTES)


def fill_copy_list(
    words: NDArray[np.int64], block_ids: Sequence[int] | NDArray[np.int64], seed: int
) -> None:
    """Write the copy list of these blocks.

    Args:
        words: the copy list to write, [>= 2 + len(block_ids)]; the rest is padding.
        block_ids: rows of the pool. When unpacking, a block with a negative id is only checked.
        seed: signed 64-bit integer.
    """
    end = _HEAD_WORDS + len(block_ids)
    words[:_HEAD_WORDS] = len(block_ids), seed
    words[_HEAD_WORDS:end] = block_ids


def make_copy_list(block_ids: Sequence[int], seed: int) -> torch.Tensor:
    """Return the copy list of these blocks on the CPU; its capacity is their number."""
    copy_list = empty_copy_list(len(block_ids))
    fill_copy_list(copy_list.numpy(), block_ids, seed)
    return copy_list


def copy_list_capacity(copy_list: torch.Tensor) -> int:
    """Return how many blocks a copy list has room for."""
    return copy_list.shape[0] - _HEAD_WORDS


def empty_copy_list(capacity: int) -> torch.Tensor:
    """Return an empty copy list, with room for `capacity`, on the CPU."""
    return torch.zeros(_HEAD_WORDS + capacity, dtype=torch.int64)


def as_words(pool: torch.Tensor) -> torch.Tensor:
    """View a contiguous pool as `[NB, words]` int32."""
    return pool.view(pool.shape[0], -1).view(torch.int32)


def staging_views(
    staging: torch.Tensor, count: int, words: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return staging's blocks `[count, words]` int32, and their sums `[count]` int64.

    Raises:
        UnsupportedShapeError: staging is too short; a kernel would write past its end.
    """
    end, size = count * words * 4, packed_bytes(count, words * 4)
    if staging.shape[0] < size:
        raise UnsupportedShapeError(
            f"{count} packed blocks take {size} bytes of staging, not {staging.shape[0]}"
        )
    # By `narrow`, since staging may be memory of another GPU: to index it with brackets switches to
    # that GPU, which takes memory there.
    blocks = staging.narrow(0, 0, end).view(torch.int32).view(count, words)
    return blocks, staging.narrow(0, end, size - end).view(torch.int64).view(count)
