# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged decode attention: split-KV flash decoding with grouped query heads packed together.

Each program takes one KV head of one sequence, all query heads of its group, and one split of the
context. Splits are cut on the device from the sequence's actual length, so their number may be
fixed when a CUDA graph is captured. A second kernel combines the splits. With a window, only its
positions are split; earlier blocks are not read, nor are their entries in the block table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels._decode_splits import (
    SplitResults,
    combine_splits,
    divide,
    find_split,
    padded_rows,
)
from pagewire.kernels._fp8_kv import as_operand, scores_factor, times_scale
from pagewire.kernels._launch import (
    await_predecessor,
    check_attention_shapes,
    next_power_of_2,
    overlap_options,
    sm_count,
)
from pagewire.kernels._scores import LOG2_E, sink_weight, soft_capped
from pagewire.kernels.fp8_numbers import UNSCALED, KvScales

# One tile of keys, and one of values, in bytes.
_TILE_BYTES = 16384
# Block ids are fetched stages ahead of the rows that they address: five stages hold two tiles.
_STAGES = 5
# Programs without splits that fill all SMs about twice are faster with half as many warps and one
# tile in shared memory (docs/notes/kernels.md).
_STAGES_OF_MANY = 4
_RESIDENT_OF_MANY = 4  # such programs of an SM
_WAVES_OF_MANY = 1.9  # how often they must fill all SMs
# See `overlap_options`. Programs that start while the kernel before still has some SMs crowd the
# others, and the fullest SM ends last: a step of four rows of 16k took 9 % longer.
_MOST_OVERLAPPING_ROWS = 1


@triton.jit(do_not_specialize=["rows", "further", "most", "tables_stride"])
def _paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    out_ptr,  # [B, H, D], written if there is a single split
    partial_ptr,  # of `SplitResults`, like the next two
    lse_ptr,
    splits_ptr,
    rows,
    further,
    most,
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
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SINGLE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,  # at least `rows`
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    CAP: tl.constexpr,  # base 2; 0 for none
    OVERLAPS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    await_predecessor(OVERLAPS)
    if SINGLE:
        row, split, splits, place = tl.program_id(1), 0, 1, tl.program_id(1)
    else:
        row, split, splits, place = find_split(
            seq_lens_ptr, splits_ptr, rows, further, most, TILE, WINDOW, EVEN, ROWS
        )
        if row >= rows:
            return
    seq_len = tl.load(seq_lens_ptr + row)
    if seq_len < 0:
        return
    visible = seq_len
    if WINDOW > 0:
        visible = tl.minimum(seq_len, WINDOW)
    split_len = tl.cdiv(tl.cdiv(visible, TILE), splits) * TILE
    start = split * split_len
    if WINDOW > 0:
        start += seq_len - visible
    stop = tl.minimum(start + split_len, seq_len)
    if (start >= seq_len) & (split > 0):
        return

    members = tl.arange(0, GROUP_PAD)
    member_mask = members < GROUP
    heads = (kv_head * GROUP + members).to(tl.int64)
    dims = tl.arange(0, DIM_PAD)
    row64 = row.to(tl.int64)
    q_rows = q_ptr + row64 * q_stride_row + heads * q_stride_head
    q_mask = member_mask[:, None]
    if DIM < DIM_PAD:
        q_mask = q_mask & (dims < DIM)[None, :]
    q = tl.load(q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)  # [G, D]
    q, scale_log2 = as_operand(q, scale_log2, k_ptr)
    k_base = k_ptr + kv_head.to(tl.int64) * k_stride_head
    v_base = v_ptr + kv_head.to(tl.int64) * v_stride_head
    table = tables_ptr + row64 * tables_stride

    m_i = tl.full([GROUP_PAD], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([GROUP_PAD], dtype=tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], dtype=tl.float32)
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        tokens = first + tl.arange(0, TILE)
        seen = tokens < stop
        block = tl.load(table + tokens // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        offset = tokens % BLOCK_SIZE
        k_rows = k_base + block * k_stride_block + offset * k_stride_token
        v_rows = v_base + block * v_stride_block + offset * v_stride_token
        k_mask = seen[None, :]
        v_mask = seen[:, None]
        if DIM < DIM_PAD:
            k_mask = k_mask & (dims < DIM)[:, None]
            v_mask = v_mask & (dims < DIM)[None, :]
        keys = tl.load(k_rows[None, :] + dims[:, None], mask=k_mask, other=0.0)  # [D, TILE]
        scores = tl.dot(q, keys.to(q.dtype), input_precision="ieee")  # [G, TILE]
        scores = scores * scale_log2
        if CAP > 0:
            scores = soft_capped(scores, CAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        p = tl.exp2(scores - m_new[:, None])
        rescale = tl.exp2(m_i - m_new)
        l_i = l_i * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        values = tl.load(v_rows[:, None] + dims[None, :], mask=v_mask, other=0.0)  # [TILE, D]
        acc = tl.dot(p.to(q.dtype), values.to(q.dtype), acc, input_precision="ieee")
        m_i = m_new

    if sinks_ptr is not None:
        weight = sink_weight(tl.load(sinks_ptr + heads, mask=member_mask, other=0.0), m_i)
        l_i += tl.where(splits == 1, weight, 0.0)
    # An empty sequence has an `l_i` of 0 and yields zeros.
    safe_l = tl.where(l_i > 0.0, l_i, 1.0)
    result = times_scale(acc / safe_l[:, None], v_scale, v_ptr)
    if splits == 1:
        out_rows = out_ptr + row64 * out_stride_row + heads * out_stride_head
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_rows[:, None] + dims[None, :], out, mask=q_mask)
    else:
        cells = place.to(tl.int64) * (tl.num_programs(0) * GROUP) + heads
        partial_rows = partial_ptr + cells * DIM
        tl.store(partial_rows[:, None] + dims[None, :], result, mask=q_mask)
        tl.store(lse_ptr + cells, m_i + tl.log2(safe_l), mask=member_mask)


class Tiling(NamedTuple):
    """Tiling of a program: positions of a tile, stages and warps."""

    tile: int
    stages: int
    warps: int


def choose_tiling(
    programs: int, group_pad: int, dim_pad: int, itemsize: int, cache_itemsize: int, sms: int
) -> Tiling:
    """Return the tiling of the programs, by measurements on an H200.

    Args:
        programs: batch rows times KV heads.
        group_pad: query heads of a program, padded.
        dim_pad: size of a head, padded.
        itemsize: bytes of a number of a query.
        cache_itemsize: bytes of a number of the cache.
        sms: streaming multiprocessors of the device.
    """
    is_converted = cache_itemsize != itemsize
    # Registers do not suffice to convert more numbers at once.
    if itemsize == 4 or dim_pad > 128 or group_pad > 16:
        cache_itemsize = itemsize
    # These programs have no splits: `choose_splits`. Two warps have registers for 16 query heads in
    # 16 bits, and to convert heads of up to 128.
    are_many = programs >= _WAVES_OF_MANY * _RESIDENT_OF_MANY * sms
    if are_many and group_pad == 16 and itemsize == 2 and not (is_converted and dim_pad > 128):
        return Tiling(_tile(dim_pad * itemsize), _STAGES if is_converted else _STAGES_OF_MANY, 2)
    return Tiling(_tile(dim_pad * cache_itemsize), _STAGES, 4)


def _tile(key_bytes: int) -> int:
    return min(max(_TILE_BYTES // key_bytes, 16), 128)


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
    """Attend one query token per sequence to its paged context.

    Shapes are those of `pagewire.kernels.PagedDecode`.

    Raises:
        UnsupportedShapeError: See `check_attention_shapes`.
    """
    check_attention_shapes(q, k_cache, v_cache)
    out = torch.empty_like(q) if out is None else out
    rows, heads, dim = q.shape
    if rows == 0:
        return out
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group, dim_pad = heads // kv_heads, next_power_of_2(dim)
    group_pad = max(16, next_power_of_2(group))
    programs, sms = rows * kv_heads, sm_count(q.device)
    itemsizes = q.element_size(), k_cache.element_size()
    tile, stages, warps = choose_tiling(programs, group_pad, dim_pad, *itemsizes, sms)
    longest = block_tables.shape[1] * block_size
    tiles = max(1, -(-min(longest, window or longest) // tile))
    division = divide(rows, kv_heads, tiles, sms)
    results = SplitResults.empty(rows, division.further, out) if division.further else None
    _paged_decode_kernel[(kv_heads, rows + division.further)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        *(results or (out, out, out)),  # unused without a split
        rows,
        division.further,
        division.most,
        scores_factor(scale, k_cache, kv_scales),
        kv_scales.values,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        sinks,
        GROUP=group,
        GROUP_PAD=group_pad,
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=tile,
        SINGLE=results is None,
        EVEN=division.is_even,
        ROWS=1 if division.is_even else padded_rows(rows),
        STAGES=stages,
        WINDOW=window or 0,
        CAP=(soft_cap or 0.0) * LOG2_E,
        num_warps=warps,
        **overlap_options(q.device, rows, _MOST_OVERLAPPING_ROWS),
    )
    if results is not None:
        combine_splits(results, seq_lens, out, division, tile, window or 0, sinks)
    return out
