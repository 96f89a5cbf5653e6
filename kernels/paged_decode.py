# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged decode attention: split-KV flash decoding with grouped query heads packed together.

Each program takes one KV head of one sequence, all query heads of its group, and one split of the
context. Splits are cut on the device from the sequence's actual length, so their number may be
fixed when a CUDA graph is captured. A second kernel combines the splits. With a window, only its
positions are split; earlier blocks are not read, nor are their entries in the block table.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

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
# Programs of an SM: its shared memory holds the tiles of three. With a cache in FP8, registers
# leave room for two, but splits for three were fast, too.
_RESIDENT = 3
# Programs without splits that fill all SMs about twice are faster with half as many warps and one
# tile in shared memory (docs/notes/kernels.md).
_STAGES_OF_MANY = 4
_RESIDENT_OF_MANY = 4  # such programs of an SM
_WAVES_OF_MANY = 1.9  # how often they must fill all SMs
_MAX_SPLITS = 128
# Tiles that a full SM reads while a single program reads one: if all SMs read, and if it is alone.
_BANDWIDTH_AN_SM, _TILES_AN_SM = 1.7, 2.3
# See `overlap_options`. Programs that start while the kernel before still has some SMs crowd the
# others, and the fullest SM ends last: a step of four rows of 16k took 9 % longer.
_MOST_OVERLAPPING_ROWS = 1


@triton.jit(do_not_specialize=["splits", "tables_stride"])
def _paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    out_ptr,  # [B, H, D], written if there is a single split
    partial_ptr,  # [B, H, splits, D] float32
    lse_ptr,  # [B, H, splits] float32, base 2
    splits,
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
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    CAP: tl.constexpr,  # base 2; 0 for none
    OVERLAPS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    await_predecessor(OVERLAPS)
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
    if (start >= seq_len) & (not SINGLE):
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

    if SINGLE and sinks_ptr is not None:
        l_i += sink_weight(tl.load(sinks_ptr + heads, mask=member_mask, other=0.0), m_i)
    # An empty sequence has an `l_i` of 0 and yields zeros.
    safe_l = tl.where(l_i > 0.0, l_i, 1.0)
    result = times_scale(acc / safe_l[:, None], v_scale, v_ptr)
    if SINGLE:
        out_rows = out_ptr + row64 * out_stride_row + heads * out_stride_head
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_rows[:, None] + dims[None, :], out, mask=q_mask)
    else:
        cells = (row64 * (tl.num_programs(0) * GROUP) + heads) * splits + split
        out_rows = partial_ptr + cells * DIM
        tl.store(out_rows[:, None] + dims[None, :], result, mask=q_mask)
        tl.store(lse_ptr + cells, m_i + tl.log2(safe_l), mask=member_mask)


@triton.jit(do_not_specialize=["splits"])
def _combine_splits_kernel(
    partial_ptr,  # [B, H, splits, D] float32
    lse_ptr,  # [B, H, splits] float32, base 2
    seq_lens_ptr,
    out_ptr,
    splits,
    out_stride_row,
    out_stride_head,
    sinks_ptr,  # [H], None without
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    await_predecessor(OVERLAPS)
    visible = tl.load(seq_lens_ptr + row)
    if visible < 0:
        return
    if WINDOW > 0:
        visible = tl.minimum(visible, WINDOW)
    split_len = tl.cdiv(tl.cdiv(visible, TILE), splits) * TILE
    split = tl.arange(0, SPLITS_PAD)
    used = (split < splits) & (split * split_len < visible)
    dims = tl.arange(0, DIM_PAD)
    mask = used[:, None]
    if DIM < DIM_PAD:
        mask = mask & (dims < DIM)[None, :]
    first = (row.to(tl.int64) * tl.num_programs(0) + head) * splits
    lse = tl.load(lse_ptr + first + split, mask=used, other=float("-inf"))
    partial = tl.load(
        partial_ptr + (first + split)[:, None] * DIM + dims[None, :],
        mask=mask,
        other=0.0,
    )  # [SPLITS, D]
    # A finite maximum avoids -inf minus -inf for an empty sequence.
    m_i = tl.maximum(tl.max(lse, axis=0), -1.0e30)
    p = tl.exp2(lse - m_i)
    l_i = tl.sum(p, axis=0)
    if sinks_ptr is not None:
        l_i += sink_weight(tl.load(sinks_ptr + head), m_i)
    result = tl.sum(partial * p[:, None], axis=0) / tl.where(l_i > 0.0, l_i, 1.0)
    out = out_ptr + row.to(tl.int64) * out_stride_row + head * out_stride_head
    if DIM < DIM_PAD:
        tl.store(out + dims, result.to(out_ptr.dtype.element_ty), mask=dims < DIM)
    else:
        tl.store(out + dims, result.to(out_ptr.dtype.element_ty))


@lru_cache(maxsize=4096)
def choose_splits(programs: int, tiles: int, sms: int, resident: int = _RESIDENT) -> int:
    """Return the number of splits of every context.

    Args:
        programs: Programs without a split: batch rows times KV heads.
        tiles: Tiles of the longest context that the block tables can hold, or of the window.
        sms: Streaming multiprocessors of the device.
        resident: Programs that one of them runs at once.

    The lengths themselves are unknown here. The result minimises an estimate of the time, whose
    unit is the time in which one program by itself reads one tile. While all SMs are full, the
    device's bandwidth limits the programs. The last ones no longer fill it: `resident` of them
    share an SM, and all SMs that have none are idle, so that `_TILES_AN_SM` limits them. One or two
    programs are expected to have long contexts, because only these gain by many splits. The
    constants are fitted to an H200.
    """
    most_at_once = sms * resident
    if programs >= 2 * most_at_once:
        return 1
    expected = min(tiles, 64 if programs > 2 else 256)
    bandwidth = sms * _BANDWIDTH_AN_SM

    def cost(splits: int) -> float:
        each = -(-expected // splits) + 0.5
        waves, rest = divmod(programs * splits, most_at_once)
        # Programs of the first wave are spread over all SMs.
        speed = rest if waves == 0 else -(-rest // resident) * _TILES_AN_SM
        units = waves * most_at_once * each / bandwidth
        if rest:
            units += rest * each / min(bandwidth, speed)
        return units + 0.0055 * programs * splits * (splits > 1)

    most = max(1, min(tiles, _MAX_SPLITS, most_at_once))
    return min(range(1, most + 1), key=cost)


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
    splits = choose_splits(programs, tiles, sms)
    partial = lse = out  # unused without a split
    if splits > 1:
        partial = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    _paged_decode_kernel[(kv_heads, splits, rows)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        partial,
        lse,
        splits,
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
        SINGLE=splits == 1,
        STAGES=stages,
        WINDOW=window or 0,
        CAP=(soft_cap or 0.0) * LOG2_E,
        num_warps=warps,
        **overlap_options(q.device, rows, _MOST_OVERLAPPING_ROWS),
    )
    if splits > 1:
        combine_splits(partial, lse, seq_lens, out, tile, window or 0, sinks)
    return out


def combine_splits(
    partial: torch.Tensor,  # [B, H, splits, D] float32
    lse: torch.Tensor,  # [B, H, splits] float32, base 2
    seq_lens: torch.Tensor,  # [B] int32
    out: torch.Tensor,  # [B, H, D]
    tile: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [H]
) -> None:
    """Combine the attention over splits into the attention over the whole context.

    A context is split as in `_paged_decode_kernel`: into equal numbers of tiles of `tile`
    positions; the last splits may have fewer or none.
    """
    rows, heads, splits, dim = partial.shape
    splits_pad = next_power_of_2(splits)
    _combine_splits_kernel[(heads, rows)](
        partial,
        lse,
        seq_lens,
        out,
        splits,
        *out.stride()[:2],
        sinks,
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        TILE=tile,
        SPLITS_PAD=splits_pad,
        WINDOW=window,
        num_warps=4 if splits_pad * dim <= 4096 else 8,
        **overlap_options(out.device, rows, _MOST_OVERLAPPING_ROWS),
    )
