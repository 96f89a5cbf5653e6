# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rows in prefill attention on Hopper GPUs: their chunk, addresses, softmax, results.

A row is a (token, query head of the group) pair; a warp group has 64 of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagewire.kernels.prefill_tiles import ROWS

_ROWS = gl.constexpr(ROWS)
_CHUNKS = gl.constexpr(128)  # compared at once, in search of a tile's chunk


@gluon.jit
def find_chunk(cu_query_lens_ptr, tile, chunks, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """Return the chunk that has a tile of rows, and the tile's number in it: see `LaunchRows`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    first_token = gl.load(cu_query_lens_ptr)
    chunk = gl.to_tensor(0)
    if chunks > 1:
        num_begun = gl.to_tensor(0)
        for first in range(0, chunks, _CHUNKS):
            index = first + gl.arange(0, _CHUNKS, layout=LAYOUT)
            is_chunk = index < chunks
            start = gl.load(cu_query_lens_ptr + index, mask=is_chunk, other=0) - first_token
            is_begun = is_chunk & (start * GROUP // SIZE + index <= tile)
            num_begun += gl.sum(is_begun.to(gl.int32), axis=0)
        chunk = num_begun - 1
    start = gl.load(cu_query_lens_ptr + chunk) - first_token
    return chunk, tile - start * GROUP // SIZE - chunk


@gluon.jit
def softmax(scores, positions, tile, m_i, scale, options, MASKED: gl.constexpr):
    """One step of the online softmax: `p`, the factor for earlier sums, new maxima."""
    WINDOW: gl.constexpr = options[0]
    CAP: gl.constexpr = options[1]
    IS_SPLIT: gl.constexpr = options[3]
    factor = scale
    if CAP > 0:
        # One instruction, with a relative error of up to 2**-11. It changes a weight by up to 0.2 %
        # at a score of 4, as rounding `p` to bfloat16 does, and by 2.4 % at a score of 50.
        scores = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [scores * (scale / CAP)], gl.float32, True, 1
        )
        factor = CAP
    if MASKED:
        BLOCK_N: gl.constexpr = scores.shape[1]
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        tokens = (tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=columns))[None, :]
        # A position past the context is past every query too.
        is_seen = tokens <= positions[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (tokens > positions[:, None] - WINDOW)
        scores = gl.where(is_seen, scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, axis=1) * factor)
    if MASKED and (WINDOW > 0 or IS_SPLIT):
        # A query may have seen no key yet: a finite maximum avoids -inf minus -inf.
        m_new = gl.maximum(m_new, -1.0e30)
    p = gl.exp2(scores * factor - m_new[:, None])
    return p, gl.exp2(m_i - m_new), m_new


@gluon.jit
def thread_sums(p):
    """Sum each thread's part of a row: 2 of 8 columns, 4 threads; the sums are added last."""
    pairs = gl.reshape(p, [_ROWS, p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(pairs, axis=3), axis=1)  # [_ROWS, 4]


@gluon.jit
def row_pointers(tensor, query_start, row, first_head, GROUP: gl.constexpr):
    """Return the addresses of rows in a tensor [T, H, ...]: a pointer and its two strides."""
    pointer, stride_row, stride_head = tensor
    token = (query_start + row // GROUP).to(gl.int64)
    head = (first_head + row % GROUP).to(gl.int64)
    return pointer + token * stride_row + head * stride_head


@gluon.jit
def store_split(acc, lse, split_out, first_row, chunk, GROUP: gl.constexpr):
    """Store the normalised output of 64 rows over a split of the context, and its `lse`."""
    query_start, _, rows, _, first_head = chunk
    partial, lses = split_out
    DIM: gl.constexpr = acc.shape[1]
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, acc.type.layout))
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    targets = row_pointers(partial, query_start, row, first_head, GROUP)
    gl.store(targets[:, None] + dims[None, :], acc, mask=(row < rows)[:, None])
    row = first_row + gl.arange(0, _ROWS, layout=lse.type.layout)
    targets = row_pointers(lses, query_start, row, first_head, GROUP)
    gl.store(targets, lse, mask=row < rows)


@gluon.jit
def store_out(acc, q_tile, out, first_row, chunk, GROUP: gl.constexpr):
    """Store the output of 64 rows, by way of shared memory."""
    query_start, _, rows, _, first_head = chunk
    DIM: gl.constexpr = acc.shape[1]
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [512 // DIM, DIM // 16], [4, 1], [1, 0])
    q_tile.store(acc.to(q_tile.dtype))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORED))
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, STORED))
    out_rows = row_pointers(out, query_start, row, first_head, GROUP)
    gl.store(out_rows[:, None] + dims[None, :], q_tile.load(STORED), mask=(row < rows)[:, None])
