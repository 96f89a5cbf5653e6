# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Write a step's keys and values into their paged slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import next_power_of_2


@triton.jit
def _reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    k_stride_block,
    k_stride_head,
    k_stride_token,
    v_stride_block,
    v_stride_head,
    v_stride_token,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = tl.arange(0, HEADS_PAD)[:, None].to(tl.int64)
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = (heads < HEADS) & (dims < DIM)
    key = tl.load(
        key_ptr + token * key_stride_token + heads * key_stride_head + dims, mask=mask
    )  # [KH, D]
    value = tl.load(
        value_ptr + token * value_stride_token + heads * value_stride_head + dims, mask=mask
    )
    k_row = k_cache_ptr + block * k_stride_block + offset * k_stride_token
    v_row = v_cache_ptr + block * v_stride_block + offset * v_stride_token
    tl.store(k_row + heads * k_stride_head + dims, key, mask=mask)
    tl.store(v_row + heads * v_stride_head + dims, value, mask=mask)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write a step's keys and values into their slots; slot -1 is skipped.

    Shapes are those of `pagewire.kernels.ReshapeAndCache`. One program a token.
    """
    tokens, heads, dim = key.shape
    if tokens == 0:
        return
    heads_pad, dim_pad = next_power_of_2(heads), next_power_of_2(dim)
    _reshape_and_cache_kernel[(tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        BLOCK_SIZE=k_cache.shape[2],
        HEADS=heads,
        HEADS_PAD=heads_pad,
        DIM=dim,
        DIM_PAD=dim_pad,
        num_warps=4 if heads_pad * dim_pad <= 2048 else 8,
    )
