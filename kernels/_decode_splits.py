# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Divides the contexts of decode attention among programs, and combines what they return.

A program reads one context, or one split of it, as in flash decoding (Dao and others, 2023). The
lengths are known on the device only, where each program finds out what it reads: one program has
the first split of a row, and a fixed number of further programs goes to the rows in proportion to
their lengths. So a long context among short ones, which would take longest, has most of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options
from pagewire.kernels._scores import sink_weight

MAX_SPLITS = 128  # of each context, if all have as many
_MOST_SPLITS = 64  # of a long context among short ones
# Programs of an SM: its shared memory holds the tiles of three. With a cache in FP8, registers
# leave room for two, but splits for three were fast, too.
RESIDENT = 3
# Tiles that a full SM reads while a single program reads one: if all SMs read, and if it is alone.
_BANDWIDTH_AN_SM, _TILES_AN_SM = 1.7, 2.3
# Contexts that may have this many tiles are divided by their lengths.
_LEAST_TILES = 33
# Rows that fill the device need no splits if they are equally long. These further programs for each
# of them split the longer ones (docs/notes/kernels.md).
_FURTHER_A_ROW = 0.75
_SPLITS_AT_ONCE = 8  # at least, that a program of the second kernel reads
_MOST_OVERLAPPING_ROWS = 1  # of the second kernel, see `overlap_options`


class Division(NamedTuple):
    """How contexts are divided.

    Attributes:
        usual: splits of each context if all are equally long.
        is_even: each context has `usual` splits, however long it is.
        further: programs of a KV head beyond one for each row.
        most: largest number of splits of a row.
    """

    usual: int
    is_even: bool
    further: int
    most: int


def divide(
    rows: int,
    width: int,
    tiles: int,
    sms: int,
    resident: int = RESIDENT,
    most_usual: int = MAX_SPLITS,
) -> Division:
    """Return how contexts are divided whose lengths are unknown.

    Args:
        rows: contexts.
        width: programs of a row without a split, one for each KV head.
        tiles: tiles of the longest context that the block tables can hold, or of the window.
        sms: streaming multiprocessors of the device.
        resident: programs that an SM runs at once.
        most_usual: splits of each of a few contexts.
    """
    usual = min(most_usual, choose_splits(rows * width, tiles, sms, resident))
    if rows == 1 or tiles < _LEAST_TILES:
        return Division(usual, True, rows * (usual - 1), usual)
    # With fewer than one for each row, none is split if all are equally long.
    further = rows * (usual - 1) if usual > 1 else int(_FURTHER_A_ROW * rows)
    return Division(usual, False, further, min(1 + further, max(usual, _MOST_SPLITS)))


@lru_cache(maxsize=4096)
def choose_splits(programs: int, tiles: int, sms: int, resident: int = RESIDENT) -> int:
    """Return the number of splits of every context that suits equal lengths.

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

    most = max(1, min(tiles, MAX_SPLITS, most_at_once))
    return min(range(1, most + 1), key=cost)


@triton.jit
def find_split(
    seq_lens_ptr,
    splits_ptr,
    rows,
    further,
    most,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return what a program reads, and where its result goes.

    That is the row, the split's number, how many splits the row has, and the result's place among
    those of all programs of a KV head: first splits are at the numbers of their rows. The program
    of a first split also notes in `splits_ptr` how many splits there are, and which of the further
    programs is the first of them. A row of at least `rows` means that there is nothing to do.
    """
    program = tl.program_id(1)
    if EVEN:
        row, split, splits = program // most, program % most, most
        before = row * (most - 1)
        place = tl.where(split == 0, row, rows + before + split - 1)
        if (split == 0) & (tl.program_id(0) == 0):
            tl.store(splits_ptr + 2 * row, splits)
            tl.store(splits_ptr + 2 * row + 1, before)
    else:
        place = program
        index = tl.arange(0, ROWS)
        tiles = _tiles(tl.load(seq_lens_ptr + index, mask=index < rows, other=0), TILE, WINDOW)
        # In proportion to the tiles: together at most `further`.
        total = tl.maximum(tl.sum(tiles), 1)
        if program < rows:
            row = program
            split = 0
            own = _tiles(tl.load(seq_lens_ptr + row), TILE, WINDOW)
            more = tl.minimum(own * further // total, most - 1)
            if tl.program_id(0) == 0:
                extra = tl.minimum(tiles * further // total, most - 1)
                tl.store(splits_ptr + 2 * row, more + 1)
                tl.store(splits_ptr + 2 * row + 1, tl.sum(tl.where(index < row, extra, 0)))
        else:
            number = program - rows
            extra = tl.minimum(tiles * further // total, most - 1)
            ends = tl.cumsum(extra)
            row = tl.sum((ends <= number).to(tl.int32))
            more = tl.sum(tl.where(index == row, extra, 0))
            split = number - tl.sum(tl.where(index == row, ends - extra, 0)) + 1
        splits = more + 1
    return row, split, splits, place


@triton.jit
def _tiles(seq_len, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return how many tiles decode attention reads of contexts."""
    visible = tl.maximum(seq_len, 0)
    if WINDOW > 0:
        visible = tl.minimum(visible, WINDOW)
    return tl.cdiv(visible, TILE)


@triton.jit(do_not_specialize=["rows"])
def _combine_splits_kernel(
    partial_ptr,  # [programs, H, D] float32
    lse_ptr,  # [programs, H] float32, base 2
    splits_ptr,  # [B, 2]: of each row its number of splits, and where further ones start
    seq_lens_ptr,
    out_ptr,
    rows,
    out_stride_row,
    out_stride_head,
    sinks_ptr,  # [H], None without
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,  # read at once
    HEADS: tl.constexpr,  # of a program
    WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(1)
    await_predecessor(OVERLAPS)
    splits = tl.load(splits_ptr + 2 * row)
    start = rows - 1 + tl.load(splits_ptr + 2 * row + 1)
    seq_len = tl.load(seq_lens_ptr + row)
    if (splits == 1) | (seq_len < 0):
        return
    tiles = tl.maximum(_tiles(seq_len, TILE, WINDOW), 1)
    used = tl.cdiv(tiles, tl.cdiv(tiles, splits))  # the last splits may have no tiles
    dims = tl.arange(0, DIM_PAD)
    heads = tl.num_programs(0) * HEADS
    for number in tl.static_range(HEADS):
        head = tl.program_id(0) * HEADS + number
        m_i = -1.0e30  # finite: avoids -inf minus -inf
        l_i = 0.0
        acc = tl.zeros([DIM_PAD], dtype=tl.float32)
        for first in range(0, used, SPLITS):
            split = first + tl.arange(0, SPLITS)
            program = tl.where(split == 0, row, start + split).to(tl.int64)
            cells = program * heads + head
            mask = (split < used)[:, None]
            if DIM < DIM_PAD:
                mask = mask & (dims < DIM)[None, :]
            lse = tl.load(lse_ptr + cells, mask=split < used, other=float("-inf"))
            partial = tl.load(
                partial_ptr + cells[:, None] * DIM + dims[None, :], mask=mask, other=0.0
            )  # [SPLITS, D]
            m_new = tl.maximum(m_i, tl.max(lse, axis=0))
            p, rescale = tl.exp2(lse - m_new), tl.exp2(m_i - m_new)
            l_i = l_i * rescale + tl.sum(p, axis=0)
            acc = acc * rescale + tl.sum(partial * p[:, None], axis=0)
            m_i = m_new
        if sinks_ptr is not None:
            l_i += sink_weight(tl.load(sinks_ptr + head), m_i)
        out = out_ptr + row.to(tl.int64) * out_stride_row + head * out_stride_head
        # An empty sequence has an `l_i` of 0 and yields zeros.
        result = (acc / tl.where(l_i > 0.0, l_i, 1.0)).to(out_ptr.dtype.element_ty)
        if DIM < DIM_PAD:
            tl.store(out + dims, result, mask=dims < DIM)
        else:
            tl.store(out + dims, result)


class SplitResults(NamedTuple):
    """Where the programs of split contexts write.

    Attributes:
        partial: [programs, H, D] float32, the attention over each program's split.
        lse: [programs, H] float32, the base 2 logarithm of each split's sum of weights.
        splits: [B, 2] int32, of each row its number of splits, and where its further ones start.
    """

    partial: torch.Tensor
    lse: torch.Tensor
    splits: torch.Tensor

    @classmethod
    def empty(cls, rows: int, further: int, out: torch.Tensor) -> SplitResults:
        """Return tensors for the programs of `rows` rows of `out`, [B, H, D]."""
        cells, device = (rows + further, out.shape[1]), out.device
        return cls(
            torch.empty((*cells, out.shape[2]), dtype=torch.float32, device=device),
            torch.empty(cells, dtype=torch.float32, device=device),
            torch.empty((rows, 2), dtype=torch.int32, device=device),
        )


def combine_splits(
    results: SplitResults,
    seq_lens: torch.Tensor,  # [B] int32
    out: torch.Tensor,  # [B, H, D]
    division: Division,
    tile: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,  # [H]
) -> None:
    """Combine the attention over splits into the attention over the whole context.

    A context is split into equal numbers of tiles of `tile` positions; the last of its splits may
    have fewer or none. Rows with one split are left alone.

    Args:
        results: of the programs that `find_split` gave their splits.
        seq_lens: lengths of the contexts.
        out: where the attention goes.
        division: of the contexts.
        tile: positions of a tile.
        window: positions that a query sees; 0 for all.
        sinks: of each head, or None.
    """
    rows, heads, dim = seq_lens.shape[0], *out.shape[1:]
    # If few rows have several splits, most programs have nothing to do.
    heads_each = 4 if division.usual == 1 and heads % 4 == 0 else 1
    at_once = next_power_of_2(division.usual)
    if not division.is_even:
        at_once = max(at_once, _SPLITS_AT_ONCE)
    _combine_splits_kernel[(heads // heads_each, rows)](
        *results,
        seq_lens,
        out,
        rows,
        *out.stride()[:2],
        sinks,
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        TILE=tile,
        SPLITS=at_once,
        HEADS=heads_each,
        WINDOW=window,
        num_warps=4 if at_once * dim <= 4096 else 8,
        **overlap_options(out.device, rows, _MOST_OVERLAPPING_ROWS),
    )


def padded_rows(rows: int) -> int:
    """Return for how many rows `find_split` is compiled, of few sizes."""
    return next(size for size in (32, 128, 512, next_power_of_2(rows)) if rows <= size)
