"""How packed KV blocks lie in staging: the blocks, and behind them an int64 sum of each."""

from __future__ import annotations

import torch

_CHECKSUM_BYTES = 8


def packed_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return what packed blocks take in staging."""
    return num_blocks * (block_bytes + _CHECKSUM_BYTES)


def max_blocks(num_bytes: int, block_bytes: int) -> int:
    """Return how many packed blocks fit so many bytes of staging."""
    return num_bytes // (block_bytes + _CHECKSUM_BYTES)


def as_words(pool: torch.Tensor) -> torch.Tensor:
    """View a contiguous pool as `[NB, words]` int32."""
    return pool.view(pool.shape[0], -1).view(torch.int32)


def staging_views(
    staging: torch.Tensor, count: int, words: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return staging's blocks `[count, words]` int32, and the sums behind them `[count]` int64."""
    end = count * words * 4
    sums = staging[end : end + count * _CHECKSUM_BYTES].view(torch.int64)
    # Raises where staging is too short: a kernel would write behind it.
    return staging[:end].view(torch.int32).view(count, words), sums.view(count)
