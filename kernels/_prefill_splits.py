# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Combines the splits of prefill attention's contexts.

Where a chunk's rows do not fill the device, `paged_prefill_hopper` also splits the context, as
flash decoding does (Dao and others, 2023): each split has its own program, which writes its
normalised output and the logarithm of its sum of weights. Lengths are known on the device only: a
short context has fewer splits, or stays whole, and is then not combined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, overlap_options
from pagewire.kernels._scores import sink_weight

_BLOCK = 16  # rows of a program


@triton.jit(do_not_specialize=["tokens", "splits", "least"])
def _combine_prefill_splits_kernel(
    partial_ptr,  # [splits, T, H, D] float32
    lse_ptr,  # [splits, T, H] float32, base 2
    cu_query_lens_ptr,
    seq_lens_ptr,
    out_ptr,
    sinks_ptr,  # [H], None without
    tokens,
    splits,
    least,
    out_stride_row,
    out_stride_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    first_row = tl.program_id(2) * BLOCK
    await_predecessor(OVERLAPS)  # each program, since a later kernel may wait for this one alone
    query_start = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - query_start
    rows = query_len * GROUP
    if first_row >= rows:
        return
    # The tiles that the rows of a program of the attention kernel see, cut as there.
    context = tl.load(seq_lens_ptr + sequence) - query_len
    program_row = first_row // ROWS * ROWS
    last_row = tl.minimum(program_row + ROWS, rows) - 1
    tiles = (context + last_row // GROUP) // TILE + 1
    if WINDOW > 0:
        tiles -= tl.maximum(context + program_row // GROUP - WINDOW + 1, 0) // TILE
    used = tl.maximum(tl.minimum(splits, tiles // least), 1)
    if used == 1:
        return
    used = tl.cdiv(tiles, tl.cdiv(tiles, used))

    row = first_row + tl.arange(0, BLOCK)
    is_real = row < rows
    heads = tl.num_programs(0) * GROUP
    head = kv_head * GROUP + row % GROUP
    token = (query_start + row // GROUP).to(tl.int64)
    cell = token * heads + head
    dims = tl.arange(0, DIM)
    m_i = tl.full([BLOCK], -1.0e30, dtype=tl.float32)  # finite: a row may see nothing of a split
    l_i = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, DIM], dtype=tl.float32)
    for split in range(used):
        at = cell + split * tokens * heads
        lse = tl.load(lse_ptr + at, mask=is_real, other=-1.0e30)
        values = tl.load(
            partial_ptr + at[:, None] * DIM + dims[None, :], mask=is_real[:, None], other=0.0
        )
        m_new = tl.maximum(m_i, lse)
        rescale, weight = tl.exp2(m_i - m_new), tl.exp2(lse - m_new)
        l_i = l_i * rescale + weight
        acc = acc * rescale[:, None] + values * weight[:, None]
        m_i = m_new
    if sinks_ptr is not None:
        l_i += sink_weight(tl.load(sinks_ptr + head, mask=is_real, other=0.0), m_i)
    out_rows = out_ptr + token * out_stride_row + head.to(tl.int64) * out_stride_head
    out = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_rows[:, None] + dims[None, :], out, mask=is_real[:, None])


def combine_prefill_splits(
    partial: torch.Tensor,
    lse: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    out: torch.Tensor,
    group: int,
    rows: int,
    tile: int,
    least: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the attention of each row whose context has several splits; leave other rows alone.

    A row is a (token, query head of the group) pair, as in `paged_prefill_hopper`.

    Args:
        partial: [splits, T, H, D] float32, each split's output; D is a power of two.
        lse: [splits, T, H] float32, the base 2 logarithm of each split's sum of weights.
        cu_query_lens: [B + 1] int32.
        seq_lens: [B] int32.
        max_query_len: at least every sequence's query length.
        out: [T, H, D].
        group: query heads of a key/value head.
        rows: rows of a program of the attention kernel; a multiple of 16.
        tile: positions of a tile.
        least: fewest tiles of a split.
        window: positions that a query sees; 0 for all.
        sinks: [H], or None.
    """
    splits, tokens, heads, dim = partial.shape
    programs = triton.cdiv(max_query_len * group, _BLOCK)
    _combine_prefill_splits_kernel[(heads // group, seq_lens.shape[0], programs)](
        partial,
        lse,
        cu_query_lens,
        seq_lens,
        out,
        sinks,
        tokens,
        splits,
        least,
        *out.stride()[:2],
        GROUP=group,
        DIM=dim,
        ROWS=rows,
        TILE=tile,
        WINDOW=window,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(out.device, rows=0),
    )
