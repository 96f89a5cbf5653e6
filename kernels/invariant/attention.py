# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged attention whose result for a query depends only on its own context.

A row of a program's tile is one head of one query; all query heads of a key/value head are packed
together, so that a decode step reads each key once. A decode row is a chunk of one query: the same
compiled kernel computes both. Every tile of keys is masked, since whether all rows of a tile see it
depends on where a chunk begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels import latent_attention as latent
from pagewire.kernels._fp8_kv import as_operand, scores_factor, times_scale
from pagewire.kernels._launch import check_attention_shapes, next_power_of_2
from pagewire.kernels._scores import LOG2_E, sink_weight, soft_capped
from pagewire.kernels.fp8_numbers import UNSCALED, KvScales

_MOST_SEQUENCES = 1 << 16  # sequences of a decode step


class _Config(NamedTuple):
    """Rows and keys of a tile, warps, and stages of which three hold one tile in flight."""

    block_m: int
    tile: int
    num_warps: int
    stages: int


def _config_of(dim_pad: int, element_size: int) -> _Config:
    """Return the tiles; they may only depend on what is the same in every batch."""
    if element_size == 4:  # no tensor cores: tiles that fit into registers
        return _Config(block_m=16, tile=16, num_warps=4, stages=2)
    if dim_pad > 128:
        return _Config(block_m=64, tile=32, num_warps=8, stages=3)
    return _Config(block_m=64, tile=64, num_warps=4, stages=3)


@triton.jit(do_not_specialize=["tables_stride"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    cu_query_lens_ptr,
    seq_lens_ptr,
    out_ptr,
    sinks_ptr,  # [H], None without
    scale_log2,
    v_scale,  # of a cache in FP8
    q_stride_row,
    q_stride_head,
    k_stride_block,
    k_stride_head,
    k_stride_token,
    v_stride_block,
    v_stride_head,
    v_stride_token,
    tables_stride,
    out_stride_row,
    out_stride_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    CAP: tl.constexpr,  # base 2; 0 for none
):
    # The last tile of queries has the longest context: it starts first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    query_start = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - query_start
    if first_row >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + sequence)
    if seq_len < 0:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    valid = rows < query_len * GROUP
    queries = rows // GROUP
    positions = seq_len - query_len + queries
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, DIM_PAD)
    tokens_of_rows = (query_start + queries).to(tl.int64)
    row_mask = valid[:, None] & (dims < DIM)[None, :]
    q_rows = q_ptr + tokens_of_rows * q_stride_row + heads * q_stride_head
    q = tl.load(q_rows[:, None] + dims[None, :], mask=row_mask, other=0.0)  # [BLOCK_M, D]
    q, scale_log2 = as_operand(q, scale_log2, k_ptr)
    k_base = k_ptr + kv_head * k_stride_head
    v_base = v_ptr + kv_head * v_stride_head
    table = tables_ptr + sequence.to(tl.int64) * tables_stride

    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], dtype=tl.float32)
    last_query = (first_row + BLOCK_M - 1) // GROUP
    stop = tl.minimum(seq_len - query_len + last_query + 1, seq_len)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(seq_len - query_len + first_row // GROUP - WINDOW + 1, 0)
    for first in tl.range(lowest // TILE * TILE, stop, TILE, num_stages=STAGES):
        tokens = first + tl.arange(0, TILE)
        inside = tokens < stop
        if WINDOW > 0:
            inside = inside & (tokens >= lowest)
        block = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = tokens % BLOCK_SIZE
        mask = inside[:, None] & (dims < DIM)[None, :]
        k_rows = k_base + block * k_stride_block + offset * k_stride_token
        v_rows = v_base + block * v_stride_block + offset * v_stride_token
        keys = tl.load(k_rows[:, None] + dims[None, :], mask=mask, other=0.0)  # [TILE, D]
        values = tl.load(v_rows[:, None] + dims[None, :], mask=mask, other=0.0)
        keys = tl.trans(keys.to(q.dtype))
        scores = tl.dot(q, keys, input_precision="ieee") * scale_log2
        if CAP > 0:
            scores = soft_capped(scores, CAP)
        # A position past the context is past every query too.
        seen = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))  # [BLOCK_M, TILE]
        # For a tile that a row does not see, `p` is exactly 0 and `rescale` exactly 1. If a row has
        # seen no key yet, as with a window, a finite maximum avoids -inf minus -inf.
        m_new = tl.maximum(tl.maximum(m_i, tl.max(scores, axis=1)), -1.0e30)
        p = tl.exp2(scores - m_new[:, None])
        rescale = tl.exp2(m_i - m_new)
        l_i = l_i * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(q.dtype), values.to(q.dtype), acc, input_precision="ieee")
        m_i = m_new
    if sinks_ptr is not None:
        l_i += sink_weight(tl.load(sinks_ptr + heads), m_i)
    # An empty sequence has an `l_i` of 0 and yields zeros.
    out = times_scale(acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None], v_scale, v_ptr)
    out_rows = out_ptr + tokens_of_rows * out_stride_row + heads * out_stride_head
    tl.store(out_rows[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=row_mask)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: KvScales = UNSCALED,
    chunks: Sequence[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """Causal attention of packed query chunks; see `pagewire.kernels.PagedPrefill`.

    Raises:
        UnsupportedShapeError: See `check_attention_shapes`.
    """
    check_attention_shapes(q, k_cache, v_cache)
    out = torch.empty_like(q) if out is None else out
    heads, dim = q.shape[1:]
    kv_heads, sequences = k_cache.shape[1], seq_lens.shape[0]
    if max_query_len == 0 or sequences == 0:
        return out
    group, dim_pad = heads // kv_heads, next_power_of_2(dim)
    config = _config_of(dim_pad, q.element_size())
    _attention_kernel[(-(-max_query_len * group // config.block_m), kv_heads, sequences)](
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_query_lens,
        seq_lens,
        out,
        sinks,
        scores_factor(scale, k_cache, kv_scales),
        kv_scales.values,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        GROUP=group,
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_M=config.block_m,
        TILE=config.tile,
        STAGES=config.stages,
        WINDOW=window or 0,
        CAP=(soft_cap or 0.0) * LOG2_E,
        num_warps=config.num_warps,
    )
    return out


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: KvScales = UNSCALED,
) -> torch.Tensor:
    """Attention of one query a sequence; see `pagewire.kernels.PagedDecode`.

    Raises:
        UnsupportedShapeError: See `check_attention_shapes`.
    """
    starts = _one_query_each(q.device, q.shape[0])
    caches = (k_cache, v_cache, block_tables)
    return paged_prefill(
        q, *caches, starts, seq_lens, 1, scale, out, window, soft_cap, sinks, kv_scales
    )


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    cu_query_lens: torch.Tensor | None = None,
    max_query_len: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention to latent vectors; see `pagewire.kernels.LatentAttention`.

    It calls the usual kernel for decode rows and chunks, without splits and with one size of
    tiles.

    Raises:
        UnsupportedShapeError: C is above 512 or R above 128, or a last dimension has gaps.
    """
    if cu_query_lens is None:
        cu_query_lens = _one_query_each(q_latent.device, seq_lens.shape[0])
    lengths = (seq_lens, scale, cu_query_lens, max_query_len, out)
    return latent.latent_attention(q_latent, q_rope, cache, block_tables, *lengths, one_tiling=True)


def _one_query_each(device: torch.device, rows: int) -> torch.Tensor:
    """Return the cumulative query lengths of a decode step."""
    return _numbers(device).narrow(0, 0, rows + 1)


@lru_cache(maxsize=16)
def _numbers(device: torch.device) -> torch.Tensor:
    """Return consecutive numbers that all decode steps share."""
    return torch.arange(_MOST_SEQUENCES + 1, dtype=torch.int32, device=device)
