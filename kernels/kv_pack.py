# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gather and scatter whole KV blocks, with a checksum of each as its words pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Words of one vector step, and steps of one program: 64 programs for a 2 MiB block.
_STEP_WORDS = 2048
_STEPS = 4


@triton.jit
def _copy_blocks_kernel(
    source_ptr,  # int32 words, [rows, words]
    target_ptr,  # int32 words, [rows, words]
    block_ids_ptr,  # [N] int64
    checksums_ptr,  # [N] int64, zero on entry
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
    tl.atomic_add(checksums_ptr + row, tl.sum(total, axis=0), sem="relaxed")


def _copy_blocks(
    source: torch.Tensor, target: torch.Tensor, block_ids: torch.Tensor, words: int, scatter: bool
) -> torch.Tensor:
    """Copy one row of `words` words per block id; return the checksums `[N]`."""
    count = block_ids.shape[0]
    checksums = torch.zeros(count, dtype=torch.int64, device=block_ids.device)
    if count == 0:
        return checksums
    steps = min(_STEPS, -(-words // _STEP_WORDS))
    _copy_blocks_kernel[(-(-words // (_STEP_WORDS * steps)), count)](
        source,
        target,
        block_ids,
        checksums,
        words,
        SCATTER=scatter,
        STEP=_STEP_WORDS,
        STEPS=steps,
        num_warps=8,
    )
    return checksums


def pack_blocks(pool: torch.Tensor, block_ids: torch.Tensor, staging: torch.Tensor) -> torch.Tensor:
    """Gather whole blocks into contiguous staging and checksum each.

    Shapes and meaning are those of `pagewire.kernels.PackBlocks`.
    """
    pool_words = pool.view(pool.shape[0], -1).view(torch.int32)
    words = pool_words.shape[1]
    used = staging[: block_ids.shape[0] * words * 4].view(torch.int32)
    return _copy_blocks(pool_words, used, block_ids, words, scatter=False)


def unpack_blocks(
    staging: torch.Tensor, pool: torch.Tensor, block_ids: torch.Tensor
) -> torch.Tensor:
    """Scatter blocks from contiguous staging into the pool; return the checksum of each.

    Shapes and meaning are those of `pagewire.kernels.UnpackBlocks`.
    """
    pool_words = pool.view(pool.shape[0], -1).view(torch.int32)
    words = pool_words.shape[1]
    used = staging[: block_ids.shape[0] * words * 4].view(torch.int32)
    return _copy_blocks(used, pool_words, block_ids, words, scatter=True)
