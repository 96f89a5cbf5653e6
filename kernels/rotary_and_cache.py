# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rotary position embedding and the paged cache's new rows, in one pass over a step's q, k, v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._fp8_kv import to_cache
from pagewire.kernels._launch import (
    await_predecessor,
    next_power_of_2,
    overlap_options,
)
from pagewire.kernels.fp8_numbers import UNSCALED, KvScales

_HEADS_PER_PROGRAM = 8


@triton.jit
def _norm_part(part, scale, weight_ptr, dims, mask):
    """Return a part of some heads times their scales and a weight, as `RmsNorm` rounds them."""
    weight = tl.load(weight_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    scaled = part.to(tl.float32) * scale
    if weight_ptr.dtype.element_ty == part.dtype:
        scaled = scaled.to(part.dtype).to(tl.float32)
    return (scaled * weight).to(part.dtype)


@triton.jit
def _write_heads(
    source,  # [BLOCK_HEADS, 1] pointers, as are the targets
    target,
    in_range,  # [BLOCK_HEADS, 1]
    norm_ptr,
    cos,
    sin,
    eps,
    inverse_scale,  # if the target is in FP8
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    NORM: tl.constexpr,
    WRITE_TAIL: tl.constexpr,
):
    """Normalise some heads if asked for, rotate their first 2 HALF numbers, and write them."""
    dims = tl.arange(0, HALF_PAD)[None, :]
    mask = in_range & (dims < HALF)
    rest = 2 * HALF + tl.arange(0, TAIL_PAD)[None, :]
    rest_mask = in_range & (rest < 2 * HALF + TAIL)
    if HALF > 0:
        first = tl.load(source + dims, mask=mask, other=0.0)
        second = tl.load(source + HALF + dims, mask=mask, other=0.0)
    if TAIL > 0:
        tail = tl.load(source + rest, mask=rest_mask, other=0.0)
    if NORM:
        squares = tl.zeros_like(in_range).to(tl.float32)  # [BLOCK_HEADS, 1]
        if HALF > 0:
            wide_first = first.to(tl.float32)
            wide_second = second.to(tl.float32)
            both = wide_first * wide_first + wide_second * wide_second
            squares += tl.sum(both, axis=1, keep_dims=True)
        if TAIL > 0:
            wide_tail = tail.to(tl.float32)
            squares += tl.sum(wide_tail * wide_tail, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / (2 * HALF + TAIL) + eps)
        if HALF > 0:
            first = _norm_part(first, scale, norm_ptr, dims, dims < HALF)
            second = _norm_part(second, scale, norm_ptr + HALF, dims, dims < HALF)
        if TAIL > 0:
            tail = _norm_part(tail, scale, norm_ptr, rest, rest < 2 * HALF + TAIL)
    if HALF > 0:
        wide_first = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        rotated_first = (wide_first * cos - wide_second * sin).to(first.dtype)
        rotated_second = (wide_second * cos + wide_first * sin).to(first.dtype)
        tl.store(target + dims, to_cache(rotated_first, inverse_scale, target), mask=mask)
        tl.store(target + HALF + dims, to_cache(rotated_second, inverse_scale, target), mask=mask)
    if WRITE_TAIL:
        tl.store(target + rest, to_cache(tail, inverse_scale, target), mask=rest_mask)


@triton.jit
def _copy_values(source, target, dims, mask, inverse_scale):
    values = tl.load(source + dims, mask=mask)
    tl.store(target + dims, to_cache(values, inverse_scale, target), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rotary_and_cache_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    k_inverse_scale,
    v_inverse_scale,
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
    TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    await_predecessor(OVERLAPS)
    dims = tl.arange(0, HALF_PAD)[None, :]
    cos = 1.0
    sin = 0.0
    if HALF > 0:
        position = tl.load(positions_ptr + token).to(tl.int64)
        row = cos_sin_ptr + position * cos_sin_stride
        cos = tl.load(row + dims, mask=dims < HALF, other=0.0).to(tl.float32)  # [1, R/2]
        sin = tl.load(row + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    q_parts: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    lanes = tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
    if part < q_parts:
        heads = part * BLOCK_HEADS + lanes
        q_rows = q_ptr + token * q_stride_token + heads * q_stride_head
        _write_heads(
            q_rows, q_rows, heads < Q_HEADS, q_norm_ptr, cos, sin, eps, 1.0,
            HALF, HALF_PAD, TAIL, TAIL_PAD, NORM, NORM and TAIL > 0,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            heads = (part - q_parts) * BLOCK_HEADS + lanes
            in_range = heads < K_HEADS
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            k_rows = k_ptr + token * k_stride_token + heads * k_stride_head
            k_out = k_cache_ptr + block * k_cache_stride_block + offset * k_cache_stride_token
            k_out += heads * k_cache_stride_head
            _write_heads(
                k_rows, k_out, in_range, k_norm_ptr, cos, sin, eps, k_inverse_scale,
                HALF, HALF_PAD, TAIL, TAIL_PAD, NORM, TAIL > 0,
            )  # fmt: skip
            v_rows = v_ptr + token * v_stride_token + heads * v_stride_head
            v_out = v_cache_ptr + block * v_cache_stride_block + offset * v_cache_stride_token
            v_out += heads * v_cache_stride_head
            if HALF > 0:
                mask = in_range & (dims < HALF)
                _copy_values(v_rows, v_out, dims, mask, v_inverse_scale)
                _copy_values(v_rows, v_out, HALF + dims, mask, v_inverse_scale)
            if TAIL > 0:
                rest = 2 * HALF + tl.arange(0, TAIL_PAD)[None, :]
                mask = in_range & (rest < 2 * HALF + TAIL)
                _copy_values(v_rows, v_out, rest, mask, v_inverse_scale)


def rotary_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scales: KvScales = UNSCALED,
) -> None:
    """Rotate q in place, and write rotated k, and v, into their KV slots.

    Shapes are those of `pagewire.kernels.RotaryAndCache`. A program takes a few heads of a token.
    """
    tokens, q_heads, dim = q.shape
    if tokens == 0:
        return
    normed = q_norm is not None
    half = 0 if cos_sin_cache is None else cos_sin_cache.shape[1] // 2
    if not normed and half == 0:
        q_heads = 0  # queries stay as they are
    k_heads, tail = k.shape[1], dim - 2 * half
    parts = -(-q_heads // _HEADS_PER_PROGRAM) + -(-k_heads // _HEADS_PER_PROGRAM)
    _rotary_and_cache_kernel[(tokens, parts)](
        positions,
        q,
        k,
        v,
        q if cos_sin_cache is None else cos_sin_cache,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm if normed else q,
        k_norm if normed else k,
        eps,
        1.0 / kv_scales.keys,
        1.0 / kv_scales.values,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        0 if cos_sin_cache is None else cos_sin_cache.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        HALF=half,
        HALF_PAD=next_power_of_2(half),
        TAIL=tail,
        TAIL_PAD=next_power_of_2(tail),
        NORM=normed,
        num_warps=2,
        **overlap_options(q.device, tokens),
    )
