# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rotary position embedding and the paged cache's new rows, in one pass over a step's q, k, v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import (
    await_predecessor,
    next_power_of_2,
    overlap_options,
)

_HEADS_PER_PROGRAM = 8


@triton.jit
def _rotate(rows, dims, mask, cos, sin, HALF: tl.constexpr):
    """Return both rotated halves of some heads, [BLOCK_HEADS, D/2] each, in their dtype."""
    first = tl.load(rows + dims, mask=mask, other=0.0)
    second = tl.load(rows + HALF + dims, mask=mask, other=0.0)
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    rotated_first = (wide_first * cos - wide_second * sin).to(first.dtype)
    rotated_second = (wide_second * cos + wide_first * sin).to(first.dtype)
    return rotated_first, rotated_second


@triton.jit
def _rotary_and_cache_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    cos_sin_stride,
    k_cache_stride_block,
    k_cache_stride_head,
    k_cache_stride_token,
    v_cache_stride_block,
    v_cache_stride_head,
    v_cache_stride_token,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    await_predecessor(OVERLAPS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    dims = tl.arange(0, HALF_PAD)[None, :]
    in_half = dims < HALF
    row = cos_sin_ptr + position * cos_sin_stride
    cos = tl.load(row + dims, mask=in_half, other=0.0).to(tl.float32)  # [1, D/2]
    sin = tl.load(row + HALF + dims, mask=in_half, other=0.0).to(tl.float32)
    q_parts: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    lanes = tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
    if part < q_parts:
        heads = part * BLOCK_HEADS + lanes
        mask = (heads < Q_HEADS) & in_half
        q_rows = q_ptr + token * q_stride_token + heads * q_stride_head
        first, second = _rotate(q_rows, dims, mask, cos, sin, HALF)
        tl.store(q_rows + dims, first, mask=mask)
        tl.store(q_rows + HALF + dims, second, mask=mask)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            heads = (part - q_parts) * BLOCK_HEADS + lanes
            mask = (heads < K_HEADS) & in_half
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            k_rows = k_ptr + token * k_stride_token + heads * k_stride_head
            first, second = _rotate(k_rows, dims, mask, cos, sin, HALF)
            k_out = k_cache_ptr + block * k_cache_stride_block + offset * k_cache_stride_token
            k_out += heads * k_cache_stride_head
            tl.store(k_out + dims, first, mask=mask)
            tl.store(k_out + HALF + dims, second, mask=mask)
            v_rows = v_ptr + token * v_stride_token + heads * v_stride_head
            v_out = v_cache_ptr + block * v_cache_stride_block + offset * v_cache_stride_token
            v_out += heads * v_cache_stride_head
            tl.store(v_out + dims, tl.load(v_rows + dims, mask=mask), mask=mask)
            tl.store(v_out + HALF + dims, tl.load(v_rows + HALF + dims, mask=mask), mask=mask)


def rotary_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate q in place, and write rotated k, and v, into their KV slots.

    Shapes are those of `pagewire.kernels.RotaryAndCache`. A program takes a few heads of a token.
    """
    tokens, q_heads, dim = q.shape
    if tokens == 0:
        return
    k_heads, half = k.shape[1], dim // 2
    parts = -(-q_heads // _HEADS_PER_PROGRAM) + -(-k_heads // _HEADS_PER_PROGRAM)
    _rotary_and_cache_kernel[(tokens, parts)](
        positions,
        q,
        k,
        v,
        cos_sin_cache,
        k_cache,
        v_cache,
        slot_mapping,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos_sin_cache.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        HALF=half,
        HALF_PAD=next_power_of_2(half),
        num_warps=2,
        **overlap_options(q.device, tokens),
    )
