"""Gather and scatter whole KV blocks with a checksum of each, in plain torch."""

from __future__ import annotations

from functools import lru_cache

import torch

from pagewire.kernels.kv_staging import as_words, staging_views

_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # as int64
# Words summed at once, 4 MiB as int64; a larger block is summed as a whole.
_WORDS_AT_ONCE = 1 << 19


@lru_cache(maxsize=4)
def _weights(words: int, device: torch.device) -> torch.Tensor:
    """Return the odd checksum weights of a block's words, `[words]` int64."""
    return torch.arange(words, dtype=torch.int64, device=device) * _MULTIPLIER | 1


def _checksums(blocks: torch.Tensor) -> torch.Tensor:
    """Return the checksum `[N]` int64 of each row of `blocks` [N, words] int32."""
    count, words = blocks.shape
    weights = _weights(words, blocks.device)
    sums = torch.empty(count, dtype=torch.int64, device=blocks.device)
    step = max(1, _WORDS_AT_ONCE // words)
    for start in range(0, count, step):
        rows = blocks[start : start + step].long()
        torch.sum(rows.mul_(weights), dim=1, out=sums[start : start + step])
    return sums


def pack_blocks(pool: torch.Tensor, copy_list: torch.Tensor, staging: torch.Tensor) -> None:
    """Gather whole blocks into contiguous staging, followed by a checksum of each.

    Shapes and meaning are those of `pagewire.kernels.PackBlocks`.
    """
    blocks, (block_ids, seed) = as_words(pool), _read(copy_list)
    staged, sums = staging_views(staging, block_ids.shape[0], blocks.shape[1])
    torch.index_select(blocks, 0, block_ids, out=staged)
    torch.add(_checksums(staged), seed, out=sums)


def unpack_blocks(
    staging: torch.Tensor, pool: torch.Tensor, copy_list: torch.Tensor, corrupt: torch.Tensor
) -> None:
    """Scatter packed blocks from staging into the pool; report whether one is corrupt.

    Shapes and meaning are those of `pagewire.kernels.UnpackBlocks`.
    """
    blocks, (block_ids, seed) = as_words(pool), _read(copy_list)
    staged, sums = staging_views(staging, block_ids.shape[0], blocks.shape[1])
    written = block_ids >= 0
    blocks[block_ids[written]] = staged[written]
    if bool((_checksums(staged) + seed != sums).any()):
        corrupt.fill_(1)


def _read(copy_list: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the block ids `[N]` and the seed of a copy list."""
    count, seed = copy_list[:2].tolist()
    return copy_list[2 : 2 + count], seed
