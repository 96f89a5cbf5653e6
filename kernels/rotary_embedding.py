# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rotary position embedding of q and k, in place, half-split pairing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import next_power_of_2

_HEADS_PER_PROGRAM = 8


@triton.jit
def _rotate_heads(
    row_ptr,
    stride_head,
    first_head,
    cos,
    sin,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    heads = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, HALF_PAD)[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    first_ptr = row_ptr + heads.to(tl.int64) * stride_head + dims
    second_ptr = first_ptr + HALF
    first = tl.load(first_ptr, mask=mask, other=0.0)  # [BLOCK_HEADS, D/2]
    second = tl.load(second_ptr, mask=mask, other=0.0)
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    tl.store(first_ptr, (wide_first * cos - wide_second * sin).to(first.dtype), mask=mask)
    tl.store(second_ptr, (wide_second * cos + wide_first * sin).to(first.dtype), mask=mask)


@triton.jit
def _rotary_embedding_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    cos_sin_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    dims = tl.arange(0, HALF_PAD)
    row = cos_sin_ptr + position * cos_sin_stride
    cos = tl.load(row + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    q_parts: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if part < q_parts:
        q_row = q_ptr + token * q_stride_token
        _rotate_heads(
            q_row, q_stride_head, part * BLOCK_HEADS, cos, sin, Q_HEADS, BLOCK_HEADS, HALF, HALF_PAD
        )
    else:
        k_row = k_ptr + token * k_stride_token
        first = (part - q_parts) * BLOCK_HEADS
        _rotate_heads(k_row, k_stride_head, first, cos, sin, K_HEADS, BLOCK_HEADS, HALF, HALF_PAD)


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Rotate q and k in place, half-split pairing, in float32.

    Shapes are those of `pagewire.kernels.RotaryEmbedding`. A program takes a few heads of a token.
    """
    tokens, q_heads, dim = q.shape
    if tokens == 0:
        return
    k_heads, half = k.shape[1], dim // 2
    parts = -(-q_heads // _HEADS_PER_PROGRAM) + -(-k_heads // _HEADS_PER_PROGRAM)
    _rotary_embedding_kernel[(tokens, parts)](
        positions,
        q,
        k,
        cos_sin_cache,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos_sin_cache.stride(0),
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        HALF=half,
        HALF_PAD=next_power_of_2(half),
        num_warps=2,
    )
