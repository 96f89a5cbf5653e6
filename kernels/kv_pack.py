# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Gather and scatter KV blocks, rows of a pool, with a checksum of each as its words pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import next_power_of_2
from pagewire.kernels.kv_staging import as_words, order_capacity, staging_views

# Words of one vector step, and steps of one program: 64 programs for a 2 MiB block.
_STEP_WORDS = 2048
_STEPS = 4


@triton.jit
def _seed_sums_kernel(
    order_ptr,  # [2 + capacity] int64
    staging_ptr,  # int64 words
    capacity,
    block_longs,
    SIZE: tl.constexpr,  # >= capacity
):
    count = tl.minimum(tl.load(order_ptr), capacity)
    seed = tl.load(order_ptr + 1)
    lanes = tl.arange(0, SIZE)
    tl.store(staging_ptr + count * block_longs + lanes, seed, mask=lanes < count)


@triton.jit
def _count_damaged_kernel(
    order_ptr,  # [2 + capacity] int64
    staging_ptr,  # int64 words
    damaged_ptr,  # [] int64
    capacity,
    block_longs,
    SIZE: tl.constexpr,  # >= capacity
):
    count = tl.minimum(tl.load(order_ptr), capacity)
    seed = tl.load(order_ptr + 1)
    lanes = tl.arange(0, SIZE)
    mask = lanes < count
    rest = tl.load(staging_ptr + count * block_longs + lanes, mask=mask, other=0)
    damaged = tl.where(mask & (rest != seed), 1, 0)
    tl.store(damaged_ptr, tl.sum(damaged, axis=0))


@triton.jit
def _copy_blocks_kernel(
    source_ptr,  # int32 words, [rows, words]
    target_ptr,  # int32 words, [rows, words]
    order_ptr,  # [2 + capacity] int64
    staging_ptr,  # int64 words: gathering adds the checksums, scattering subtracts them
    capacity,
    words,
    SCATTER: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
):
    # 0x9E3779B97F4A7C15 as int64; arithmetic mod 2**64 is the same.
    MULTIPLIER: tl.constexpr = -0x61C8864680B583EB
    row = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(order_ptr), capacity)
    if row < count:
        block = tl.load(order_ptr + 2 + row)
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
        tl.atomic_add(staging_ptr + count * (words // 2) + row, checksum, sem="relaxed")


def _copy_blocks(
    source: torch.Tensor,  # [rows, words] int32
    target: torch.Tensor,  # [rows, words] int32
    order: torch.Tensor,  # [2 + capacity] int64
    staging: torch.Tensor,  # int64 words: the blocks, and the sums behind them
    scatter: bool,
) -> None:
    capacity, words = order_capacity(order), source.shape[1]
    if capacity == 0:
        return
    steps = min(_STEPS, -(-words // _STEP_WORDS))
    _copy_blocks_kernel[(-(-words // (_STEP_WORDS * steps)), capacity)](
        source,
        target,
        order,
        staging,
        capacity,
        words,
        SCATTER=scatter,
        STEP=_STEP_WORDS,
        STEPS=steps,
        num_warps=8,
    )


def pack_blocks(pool: torch.Tensor, order: torch.Tensor, staging: torch.Tensor) -> None:
    """Gather whole blocks into contiguous staging, and behind them a checksum of each.

    Shapes and meaning are those of `pagewire.kernels.PackBlocks`.
    """
    blocks, capacity = as_words(pool), order_capacity(order)
    words = blocks.shape[1]
    staged, _ = staging_views(staging, capacity, words)
    longs = staged.view(torch.int64)
    size = next_power_of_2(capacity)
    _seed_sums_kernel[(1,)](order, longs, capacity, words // 2, SIZE=size)
    _copy_blocks(blocks, staged, order, longs, scatter=False)


def unpack_blocks(staging: torch.Tensor, pool: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Scatter packed blocks from staging into the pool; return how many are damaged.

    Shapes and meaning are those of `pagewire.kernels.UnpackBlocks`.
    """
    blocks, capacity = as_words(pool), order_capacity(order)
    words = blocks.shape[1]
    staged, _ = staging_views(staging, capacity, words)
    longs = staged.view(torch.int64)
    damaged = torch.empty((), dtype=torch.int64, device=staging.device)
    _copy_blocks(staged, blocks, order, longs, scatter=True)
    size = next_power_of_2(capacity)
    _count_damaged_kernel[(1,)](order, longs, damaged, capacity, words // 2, SIZE=size)
    return damaged
