# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Copies of an FP8 cache's blocks in the dtype of queries, for kernels that read no FP8.

A long chunk reads each key and value many times: to convert them once, into a workspace, takes far
less than to convert them at each reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import next_power_of_2
from pagewire.kernels.fp8_numbers import WORKSPACE_BYTES


class KvCopies(NamedTuple):
    """Blocks of some key/value heads, in the dtype of queries.

    Attributes:
        first: the first of these heads.
        all_heads: number of the cache's key/value heads.
        keys: `[blocks, heads, BS, D]`, the cache's numbers, without their scale.
        values: likewise, times their scale.
        tables: `[B, max_blocks]` int32, the block tables of the copies.
    """

    first: int
    all_heads: int
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor

    def queries(self, heads: int) -> slice:
        """Return the query heads, of this number of them, that read these key/value heads."""
        group = heads // self.all_heads
        return slice(self.first * group, (self.first + self.keys.shape[1]) * group)


@triton.jit(do_not_specialize=["first_head", "window", "tables_stride", "new_tables_stride"])
def _copy_kernel(
    k_ptr,  # [NB, KH, BS, D] e4m3
    v_ptr,  # likewise
    tables_ptr,  # [B, max_blocks] int32
    cu_query_lens_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    keys_ptr,  # [blocks, heads, BS, D] contiguous
    values_ptr,  # likewise
    new_tables_ptr,  # [B, max_blocks] int32
    first_head,
    v_scale,
    window,  # 0 for none
    k_stride_block,
    k_stride_head,
    k_stride_token,
    v_stride_block,
    v_stride_head,
    v_stride_token,
    tables_stride,
    new_tables_stride,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    index = tl.program_id(0)  # of a block of the sequence
    sequence = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + sequence)
    query_start = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - query_start
    blocks = tl.cdiv(seq_len, BLOCK_SIZE)
    is_seen = (window == 0) | ((index + 1) * BLOCK_SIZE > seq_len - query_len - window + 1)
    if (index >= blocks) | (not is_seen):
        return
    copy = index
    for other in range(sequence):
        copy += tl.cdiv(tl.load(seq_lens_ptr + other), BLOCK_SIZE)
    head = tl.program_id(2)
    if head == 0:
        tl.store(new_tables_ptr + sequence * new_tables_stride + index, copy)
    block = tl.load(tables_ptr + sequence.to(tl.int64) * tables_stride + index).to(tl.int64)
    tokens = tl.arange(0, BLOCK_SIZE)[:, None]
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = dims < DIM
    k_head, v_head = (first_head + head) * k_stride_head, (first_head + head) * v_stride_head
    k_rows = k_ptr + block * k_stride_block + k_head + tokens * k_stride_token
    v_rows = v_ptr + block * v_stride_block + v_head + tokens * v_stride_token
    key = tl.load(k_rows + dims, mask=mask, other=0.0)
    value = tl.load(v_rows + dims, mask=mask, other=0.0).to(tl.float32) * v_scale
    rows = ((copy.to(tl.int64) * tl.num_programs(2) + head) * BLOCK_SIZE + tokens) * DIM
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + rows + dims, key.to(dtype), mask=mask)
    tl.store(values_ptr + rows + dims, value.to(dtype), mask=mask)


def heads_at_once(
    k_cache: torch.Tensor, chunks: Sequence[tuple[int, int]], dtype: torch.dtype
) -> int:
    """Return how many key/value heads of all contexts the workspace holds at once.

    It is a divisor of their number, or 0 if it cannot hold one.
    """
    heads, block_size, dim = k_cache.shape[1:]
    head_bytes = 2 * sum(_blocks(k_cache, chunks)) * block_size * dim * dtype.itemsize
    most = min(heads, WORKSPACE_BYTES // max(head_bytes, 1))
    return max((count for count in range(1, most + 1) if heads % count == 0), default=0)


def _blocks(k_cache: torch.Tensor, chunks: Sequence[tuple[int, int]]) -> list[int]:
    return [triton.cdiv(context, k_cache.shape[2]) for _, context in chunks]


def copy_blocks(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    chunks: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    v_scale: float,
    window: int | None,
) -> Iterator[KvCopies]:
    """Yield copies of all heads' blocks, of as many heads at a time as the workspace holds.

    Blocks before all windows are left out; their entries in the block tables are not read.

    What is yielded is overwritten after the next one is asked for.

    Args:
        k_cache: `[NB, KH, BS, D]` e4m3.
        v_cache: likewise.
        block_tables: `[B, max_blocks]` int32.
        cu_query_lens: `[B + 1]` int32, first row of each chunk, and the end of the last.
        seq_lens: `[B]` int32, each context's tokens.
        chunks: length and context of each sequence, for which `heads_at_once` is at least 1.
        dtype: of two bytes.
        v_scale: the values' scale.
        window: positions that a query sees; None for all.
    """
    heads, block_size, dim = k_cache.shape[1:]
    lengths, at_once = _blocks(k_cache, chunks), heads_at_once(k_cache, chunks, dtype)
    # Of the same size for each call, so that a first step shows the most.
    most = WORKSPACE_BYTES // (2 * at_once * block_size * dim * dtype.itemsize)
    shape, device = (most, at_once, block_size, dim), k_cache.device
    keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    tables = torch.empty((len(chunks), max(lengths)), dtype=torch.int32, device=device)
    for first in range(0, heads, at_once):
        _copy_kernel[(max(lengths), len(chunks), at_once)](
            k_cache,
            v_cache,
            block_tables,
            cu_query_lens,
            seq_lens,
            keys,
            values,
            tables,
            first,
            v_scale,
            window or 0,
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            block_tables.stride(0),
            tables.stride(0),
            BLOCK_SIZE=block_size,
            DIM=dim,
            DIM_PAD=next_power_of_2(dim),
            num_warps=1,
        )
        yield KvCopies(first, heads, keys, values, tables)
