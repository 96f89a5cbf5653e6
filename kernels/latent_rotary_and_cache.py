# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rotation of queries and the new rows of a cache of latent vectors, in one pass over a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options

_HEADS_PER_PROGRAM = 16


@triton.jit
def _rotate(
    source,  # [N, 1] pointers, as are the targets
    target,
    in_range,  # [N, 1]
    cos,  # [1, HALF_PAD]
    sin,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate pairs of some rows, which stay where they are in their row."""
    pairs = tl.arange(0, HALF_PAD)[None, :]
    mask = in_range & (pairs < HALF)
    if INTERLEAVED:
        first_at = 2 * pairs
        second_at = 2 * pairs + 1
    else:
        first_at = pairs
        second_at = HALF + pairs
    first = tl.load(source + first_at, mask=mask, other=0.0)
    second = tl.load(source + second_at, mask=mask, other=0.0)
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    tl.store(target + first_at, (wide_first * cos - wide_second * sin).to(first.dtype), mask=mask)
    tl.store(target + second_at, (wide_second * cos + wide_first * sin).to(first.dtype), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _latent_rotary_and_cache_kernel(
    positions_ptr,
    q_ptr,
    latent_ptr,
    k_ptr,
    cos_sin_ptr,
    cache_ptr,
    slots_ptr,
    norm_ptr,
    eps,
    q_stride_token,
    q_stride_head,
    latent_stride,
    k_stride,
    cos_sin_stride,
    cache_stride_block,
    cache_stride_token,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    await_predecessor(OVERLAPS)
    pairs = tl.arange(0, HALF_PAD)[None, :]
    row = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride
    cos = tl.load(row + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    if part < tl.num_programs(1) - 1:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
        q_rows = q_ptr + token * q_stride_token + heads * q_stride_head
        _rotate(q_rows, q_rows, heads < HEADS, cos, sin, HALF, HALF_PAD, INTERLEAVED)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            out = cache_ptr + slot // BLOCK_SIZE * cache_stride_block
            out += slot % BLOCK_SIZE * cache_stride_token
            dims = tl.arange(0, RANK_PAD)
            inside = dims < RANK
            latent = tl.load(latent_ptr + token * latent_stride + dims, mask=inside, other=0.0)
            weight = tl.load(norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)
            wide = latent.to(tl.float32)
            normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / RANK + eps)
            if norm_ptr.dtype.element_ty == latent.dtype:
                normed = normed.to(latent.dtype).to(tl.float32)
            tl.store(out + dims, (normed * weight).to(latent.dtype), mask=inside)
            one = tl.zeros([1, 1], dtype=tl.int64)
            k_row = k_ptr + token * k_stride + one
            _rotate(k_row, out + RANK + one, one == 0, cos, sin, HALF, HALF_PAD, INTERLEAVED)


def latent_rotary_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    interleaved: bool = False,
) -> None:
    """Rotate q in place; write normalised latent vectors and rotated keys into their KV slots.

    Shapes are those of `pagewire.kernels.LatentRotaryAndCache`. A token has programs for a few
    heads of its query each, and one for its row of the cache.
    """
    tokens, heads, rotated = q.shape
    if tokens == 0:
        return
    rank = latent.shape[1]
    _latent_rotary_and_cache_kernel[(tokens, -(-heads // _HEADS_PER_PROGRAM) + 1)](
        positions,
        q,
        latent,
        k,
        cos_sin_cache,
        cache,
        slot_mapping,
        norm,
        eps,
        *q.stride()[:2],
        latent.stride(0),
        k.stride(0),
        cos_sin_cache.stride(0),
        *cache.stride()[:2],
        HEADS=heads,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        BLOCK_SIZE=cache.shape[1],
        RANK=rank,
        RANK_PAD=next_power_of_2(rank),
        HALF=rotated // 2,
        HALF_PAD=next_power_of_2(rotated // 2),
        INTERLEAVED=interleaved,
        num_warps=2,
        **overlap_options(q.device, tokens),
    )
