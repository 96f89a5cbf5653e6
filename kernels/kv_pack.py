# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gather and scatter whole KV blocks, with a checksum of each as its words pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels.kv_staging import as_words, staging_views

# Words of one vector step, and steps of one program: 64 programs for a 2 MiB block.
_STEP_WORDS = 2048
_STEPS = 4


@triton.jit
def _copy_blocks_kernel(
    source_ptr,  # int32 words, [rows, words]
    target_ptr,  # int32 words, [rows, words]
    block_ids_ptr,  # [N] int64
    sums_ptr,  # [N] int64: gathering adds the checksums, scattering subtracts them
    words,
    SCATTER: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
):
    # 0x9E3779B97F4A7C15 as int64; arithmetic mod 2**64 is the same.
    MULTIPLIER: tl.constexpr = -0x61C8864680B583EB
    row = tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids_ptr + row)
    source_row = block
    target_row = row
    if SCATTER:
        source_row = row
        target_row = block
    lanes = tl.arange(0, STEP)
    lane_weights = lanes.to(tl.int64) * MULTIPLIER
    first = tl.program_id(0) * (STEP * STEPS)
    source = source_ptr + source_row * words
    target = target_ptr + target_row * words
    written = tl.where(target_row >= 0, words, 0)
    total = tl.zeros([STEP], dtype=tl.int64)
    for step in tl.static_range(STEPS):
        base = first + step * STEP
        index = base + lanes
        mask = index < words
        word = tl.load(source + index, mask=mask, other=0)
        tl.store(target + index, word, mask=index < written)
        base_weight = base.to(tl.int64) * MULTIPLIER
        weight = (lane_weights + base_weight) | 1
        total += word.to(tl.int64) * weight
    checksum = tl.sum(total, axis=0)
    if SCATTER:
        checksum = -checksum
    tl.atomic_add(sums_ptr + row, checksum, sem="relaxed")


def _copy_blocks(
    source: torch.Tensor,  # [rows, words] int32
    target: torch.Tensor,  # [rows, words] int32
    block_ids: torch.Tensor,  # [N] int64
    sums: torch.Tensor,  # [N] int64
    scatter: bool,
) -> None:
    count, words = block_ids.shape[0], source.shape[1]
    if count == 0:
        return
    steps = min(_STEPS, -(-words // _STEP_WORDS))
    _copy_blocks_kernel[(-(-words // (_STEP_WORDS * steps)), count)](
        source,
        target,
        block_ids,
        sums,
        words,
        SCATTER=scatter,
        STEP=_STEP_WORDS,
        STEPS=steps,
        num_warps=8,
    )


def pack_blocks(
    pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor, seed: int
) -> None:
    """Gather whole blocks into contiguous staging, and behind them a checksum of each.

    Shapes and meaning are those of `pagewire.kernels.PackBlocks`.
    """
    blocks = as_words(pool)
    staged, sums = staging_views(staging, block_ids.shape[0], blocks.shape[1])
    sums.fill_(seed)
    _copy_blocks(blocks, staged, block_ids, sums, scatter=False)


def unpack_blocks(
    staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor
) -> torch.Tensor:
    """Scatter packed blocks from staging into the pool; return what remains of their sums.

    Shapes and meaning are those of `pagewire.kernels.UnpackBlocks`.
    """
    blocks = as_words(pool)
    staged, sums = staging_views(staging, block_ids.shape[0], blocks.shape[1])
    _copy_blocks(staged, blocks, block_ids, sums, scatter=True)
    return sums
