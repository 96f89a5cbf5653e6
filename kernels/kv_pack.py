# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gather and scatter KV blocks (rows of a pool), and compute a checksum of each block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import sm_count
from pagewire.kernels.kv_staging import as_words, copy_list_capacity, staging_views

# Words of one vector step, warps of a program, and programs per SM. Each program takes whole rows.
# Enough bytes are in flight to saturate the memory, and few programs are idle if a copy list is
# shorter than its capacity.
_STEP_WORDS = 8192
_WARPS = 8
_CTAS_PER_SM = 4

# 0x9E3779B97F4A7C15 as int64; arithmetic mod 2**64 is the same.
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64


@triton.jit(do_not_specialize=["capacity"])
def _move_blocks_kernel(
    source_ptr,  # int32 words, [rows, words]
    target_ptr,  # int32 words, [rows, words]
    copy_list_ptr,  # [2 + capacity] int64
    staging_ptr,  # int64 words: the blocks, then their sums
    corrupt_ptr,  # [] int64: set to 1 where SCATTER, else not touched
    capacity,
    words,
    SCATTER: tl.constexpr,
    STEP: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    STEP_WEIGHT: tl.constexpr,  # STEP * MULTIPLIER, mod 2**64
):
    count = tl.minimum(tl.load(copy_list_ptr), capacity).to(tl.int32)
    seed = tl.load(copy_list_ptr + 1)
    width = words.to(tl.int64)
    sums = staging_ptr + count * (width // 2)
    lanes = tl.arange(0, STEP)
    first_weights = lanes.to(tl.int64) * MULTIPLIER
    for row in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        block = tl.load(copy_list_ptr + 2 + row)
        if SCATTER:
            source = source_ptr + row * width
            target = target_ptr + block * width
            written = tl.where(block >= 0, words, 0)
        else:
            source = source_ptr + block * width
            target = target_ptr + row * width
            written = words
        weights = first_weights
        total = tl.zeros([STEP], dtype=tl.int64)
        for base in tl.range(0, words, STEP):
            index = base + lanes
            word = tl.load(source + index, mask=index < words, other=0)
            tl.store(target + index, word, mask=index < written)
            total += word.to(tl.int64) * (weights | 1)
            weights += STEP_WEIGHT
        checksum = seed + tl.sum(total, axis=0)
        if SCATTER:
            tl.store(corrupt_ptr, 1, mask=tl.load(sums + row) != checksum)
        else:
            tl.store(sums + row, checksum)


def _wrapped(number: int) -> int:
    """Return a number mod 2**64, as int64."""
    return (number + 2**63) % 2**64 - 2**63


def _move_blocks(
    source: torch.Tensor,  # [rows, words] int32
    target: torch.Tensor,  # [rows, words] int32
    copy_list: torch.Tensor,  # [2 + capacity] int64
    staged: torch.Tensor,  # [capacity, words] int32, before the sums: source or target
    corrupt: torch.Tensor | None,  # [] int64; None to gather
) -> None:
    capacity, words = copy_list_capacity(copy_list), source.shape[1]
    if capacity == 0:
        return
    programs = min(capacity, _CTAS_PER_SM * sm_count(source.device))
    _move_blocks_kernel[(programs,)](
        source,
        target,
        copy_list,
        staged.view(torch.int64),
        copy_list if corrupt is None else corrupt,
        capacity,
        words,
        SCATTER=corrupt is not None,
        STEP=_STEP_WORDS,
        MULTIPLIER=_MULTIPLIER,
        STEP_WEIGHT=_wrapped(_STEP_WORDS * _MULTIPLIER),
        num_warps=_WARPS,
    )


def pack_blocks(pool: torch.Tensor, copy_list: torch.Tensor, staging: torch.Tensor) -> None:
    """Gather whole blocks into contiguous staging, followed by a checksum of each.

    Shapes and meaning are those of `pagewire.kernels.PackBlocks`.
    """
    blocks = as_words(pool)
    staged, _ = staging_views(staging, copy_list_capacity(copy_list), blocks.shape[1])
    _move_blocks(blocks, staged, copy_list, staged, None)


def unpack_blocks(
    staging: torch.Tensor, pool: torch.Tensor, copy_list: torch.Tensor, corrupt: torch.Tensor
) -> None:
    """Scatter packed blocks from staging into the pool; report whether one is corrupt.

    Shapes and meaning are those of `pagewire.kernels.UnpackBlocks`.
    """
    blocks = as_words(pool)
    staged, _ = staging_views(staging, copy_list_capacity(copy_list), blocks.shape[1])
    _move_blocks(staged, blocks, copy_list, staged, corrupt)
