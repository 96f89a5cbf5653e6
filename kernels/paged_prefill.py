# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged prefill attention: causal flash attention of packed query chunks over paged context.

Each program takes a tile of one sequence's queries for one head. Tiles of keys that all its queries
see need no masks; only those across the diagonal, or across the start of a window, compare
positions. Blocks before all windows are not read, nor are their entries in the block table. On
Hopper GPUs the launcher uses the kernel of `paged_prefill_hopper` where it applies, for long chunks
on copies of a cache in FP8.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
import triton
import triton.language as tl

from pagewire.kernels._fp8_kv import as_operand, scores_factor, times_scale
from pagewire.kernels._kv_copies import copy_blocks, heads_at_once
from pagewire.kernels._launch import check_attention_shapes, next_power_of_2
from pagewire.kernels._scores import LOG2_E, sink_weight, soft_capped
from pagewire.kernels.fp8_numbers import UNSCALED, KvScales
from pagewire.kernels.prefill_tiles import LEAST_COPIED


@triton.jit
def _attend_tiles(
    q,
    acc,
    l_i,
    m_i,
    start,
    stop,
    positions,
    lowest,  # of the positions that these queries see; 0 without a window
    seq_len,
    k_base,
    v_base,
    table,
    k_stride_block,
    k_stride_token,
    v_stride_block,
    v_stride_token,
    scale_log2,  # [BLOCK_M, 1] if `ROW_SCALES`
    ROW_SCALES: tl.constexpr,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    dims = tl.arange(0, DIM_PAD)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        offset = tokens % BLOCK_SIZE
        if MASKED:
            inside = tokens < seq_len
            if WINDOW > 0:
                inside = inside & (tokens >= lowest)
            block = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            k_rows = k_base + block * k_stride_block + offset * k_stride_token
            v_rows = v_base + block * v_stride_block + offset * v_stride_token
            mask = inside[:, None]
            if DIM < DIM_PAD:
                mask = mask & (dims < DIM)[None, :]
            keys = tl.load(k_rows[:, None] + dims[None, :], mask=mask, other=0.0)
            values = tl.load(v_rows[:, None] + dims[None, :], mask=mask, other=0.0)
        else:
            block = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
            k_rows = k_base + block * k_stride_block + offset * k_stride_token
            v_rows = v_base + block * v_stride_block + offset * v_stride_token
            if DIM < DIM_PAD:
                mask = (dims < DIM)[None, :]
                keys = tl.load(k_rows[:, None] + dims[None, :], mask=mask, other=0.0)
                values = tl.load(v_rows[:, None] + dims[None, :], mask=mask, other=0.0)
            else:
                keys = tl.load(k_rows[:, None] + dims[None, :])  # [BLOCK_N, D]
                values = tl.load(v_rows[:, None] + dims[None, :])
        keys = tl.trans(keys.to(q.dtype))
        scores = tl.dot(q, keys, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        factor = scale_log2
        if CAP > 0:
            scores = soft_capped(scores * scale_log2, CAP)
            factor = 1.0
        elif ROW_SCALES:
            scores = scores * scale_log2
            factor = 1.0
        if MASKED:
            # A position past the context is past every query too.
            seen = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1) * factor)
        if MASKED and WINDOW > 0:
            # A query may have seen no key yet: a finite maximum avoids -inf minus -inf.
            m_new = tl.maximum(m_new, -1.0e30)
        p = tl.exp2(scores * factor - m_new[:, None])
        rescale = tl.exp2(m_i - m_new)
        l_i = l_i * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(q.dtype), values.to(q.dtype), acc, input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["tables_stride"])
def _paged_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    cu_query_lens_ptr,
    seq_lens_ptr,
    out_ptr,
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
    sinks_ptr,  # [H], None without
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    CAP: tl.constexpr,  # base 2; 0 for none
):
    head = tl.program_id(0)
    sequence = tl.program_id(2)
    # The last tile of queries has the longest context: it starts first.
    tile_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    query_start = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - query_start
    if tile_start >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + sequence)
    queries = tile_start + tl.arange(0, BLOCK_M)
    valid = queries < query_len
    positions = seq_len - query_len + queries
    dims = tl.arange(0, DIM_PAD)
    rows = (query_start + queries).to(tl.int64)
    q_rows = q_ptr + rows * q_stride_row + head.to(tl.int64) * q_stride_head
    q_mask = valid[:, None]
    if DIM < DIM_PAD:
        q_mask = q_mask & (dims < DIM)[None, :]
    q = tl.load(q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)  # [BLOCK_M, D]
    q, scale_log2 = as_operand(q, scale_log2, k_ptr)
    ROW_SCALES: tl.constexpr = q.dtype != q_ptr.dtype.element_ty
    kv_head = (head // GROUP).to(tl.int64)
    k_base = k_ptr + kv_head * k_stride_head
    v_base = v_ptr + kv_head * v_stride_head
    table = tables_ptr + sequence.to(tl.int64) * tables_stride

    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], dtype=tl.float32)
    first_position = seq_len - query_len + tile_start
    unmasked = (first_position + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(first_position + BLOCK_M, seq_len)
    lowest = 0
    start = 0
    if WINDOW > 0:
        lowest = tl.maximum(first_position - WINDOW + 1, 0)
        # From here on all queries see all, up to the diagonal.
        inner = tl.cdiv(tl.maximum(first_position + BLOCK_M - WINDOW, 0), BLOCK_N) * BLOCK_N
        start = tl.minimum(inner, unmasked)
        acc, l_i, m_i = _attend_tiles(
            q, acc, l_i, m_i, lowest // BLOCK_N * BLOCK_N, start, positions, lowest, seq_len,
            k_base, v_base, table, k_stride_block, k_stride_token, v_stride_block, v_stride_token,
            scale_log2, ROW_SCALES, True, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, STAGES, WINDOW, CAP,
        )  # fmt: skip
    acc, l_i, m_i = _attend_tiles(
        q, acc, l_i, m_i, start, unmasked, positions, lowest, seq_len, k_base, v_base, table,
        k_stride_block, k_stride_token, v_stride_block, v_stride_token, scale_log2,
        ROW_SCALES, False, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, STAGES, WINDOW, CAP,
    )  # fmt: skip
    acc, l_i, m_i = _attend_tiles(
        q, acc, l_i, m_i, unmasked, stop, positions, lowest, seq_len, k_base, v_base, table,
        k_stride_block, k_stride_token, v_stride_block, v_stride_token, scale_log2,
        ROW_SCALES, True, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, STAGES, WINDOW, CAP,
    )  # fmt: skip
    if sinks_ptr is not None:
        l_i += sink_weight(tl.load(sinks_ptr + head), m_i)
    if WINDOW > 0:
        l_i = tl.where(l_i > 0.0, l_i, 1.0)  # rows past the chunk may have seen no key
    out_rows = out_ptr + rows * out_stride_row + head.to(tl.int64) * out_stride_head
    out = times_scale(acc / l_i[:, None], v_scale, v_ptr).to(out_ptr.dtype.element_ty)
    tl.store(out_rows[:, None] + dims[None, :], out, mask=q_mask)


@dataclass(frozen=True, slots=True)
class _Config:
    """Tile sizes and launch options of one head dimension and dtype.

    Block ids are fetched stages ahead of the rows that they address, so three stages hold one
    tile of keys and values next to the one in use, and five hold two.
    """

    block_m: int
    block_n: int
    num_warps: int
    stages: int


def _choose_config(dim: int, element_size: int, max_query_len: int, converts: bool) -> _Config:
    """Return the tiles for a head dimension, an element's bytes and the longest chunk.

    Args:
        dim: padded.
        element_size: of a query's number.
        max_query_len: longest chunk.
        converts: whether numbers of keys and values are converted, which takes registers.
    """
    if element_size == 4:  # no tensor cores: tiles that fit into registers
        return _Config(block_m=16 if dim > 128 else 32, block_n=32, num_warps=4, stages=2)
    if max_query_len <= 16:
        return _Config(block_m=16, block_n=64 if dim <= 128 else 32, num_warps=4, stages=3)
    if dim > 128:
        return _Config(block_m=64, block_n=32 if converts else 64, num_warps=4, stages=2)
    if max_query_len <= 64:
        return _Config(block_m=64, block_n=64, num_warps=4, stages=3)
    return _Config(block_m=128, block_n=64, num_warps=8, stages=5)


@lru_cache(maxsize=16)
def _hopper_kernel(device: torch.device) -> ModuleType | None:
    """Return the Hopper kernel's module, or None for other devices and without its Gluon."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return importlib.import_module("pagewire.kernels.paged_prefill_hopper")
    except (ImportError, AttributeError):  # Gluon is experimental: names may change
        return None


def _reads_copies(
    hopper: ModuleType, q: torch.Tensor, k_cache: torch.Tensor, chunks: Sequence[tuple[int, int]]
) -> bool:
    """Return whether the Hopper kernel reads copies of blocks in FP8."""
    return (
        k_cache.dtype == torch.float8_e4m3fn
        and max(length for length, _ in chunks) >= LEAST_COPIED
        and hopper.has_tiles(q.dtype, *k_cache.shape[2:])
        and heads_at_once(k_cache, chunks, q.dtype) > 0
    )


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
    """Causal attention of packed query chunks over their paged context.

    Shapes are those of `pagewire.kernels.PagedPrefill`; `max_query_len` sizes the grid and must be
    at least every sequence's query length.

    Raises:
        UnsupportedShapeError: See `check_attention_shapes`.
    """
    check_attention_shapes(q, k_cache, v_cache)
    out = torch.empty_like(q) if out is None else out
    heads, dim = q.shape[1], q.shape[2]
    sequences = seq_lens.shape[0]
    if max_query_len == 0 or sequences == 0:
        return out
    hopper = _hopper_kernel(q.device)
    lengths = (cu_query_lens, seq_lens, max_query_len)
    if hopper is not None and hopper.is_supported(q, k_cache, v_cache):
        hopper.hopper_prefill(
            q, k_cache, v_cache, block_tables, *lengths, scale, out, window, soft_cap, sinks
        )
        return out
    if hopper is not None and chunks is not None and _reads_copies(hopper, q, k_cache, chunks):
        paged = (k_cache, v_cache, block_tables, cu_query_lens, seq_lens)
        for part in copy_blocks(*paged, chunks, q.dtype, kv_scales.values, window):
            own = part.queries(heads)
            hopper.hopper_prefill(
                q[:, own], part.keys, part.values, part.tables, *lengths, scale * kv_scales.keys,
                out[:, own], window, soft_cap, None if sinks is None else sinks[own],
            )  # fmt: skip
        return out
    dim_pad = next_power_of_2(dim)
    converts = k_cache.dtype != q.dtype
    config = _choose_config(dim_pad, q.element_size(), max_query_len, converts)
    _paged_prefill_kernel[(heads, -(-max_query_len // config.block_m), sequences)](
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_query_lens,
        seq_lens,
        out,
        scores_factor(scale, k_cache, kv_scales),
        kv_scales.values,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        sinks,
        GROUP=heads // k_cache.shape[1],
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        WINDOW=window or 0,
        CAP=(soft_cap or 0.0) * LOG2_E,
        num_warps=config.num_warps,
    )
    return out
