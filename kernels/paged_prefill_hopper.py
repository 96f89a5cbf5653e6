# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged prefill attention for Hopper GPUs, in Gluon.

A program takes 128 rows of one sequence and key/value head; a row is a (token, query head of the
group) pair, so that short chunks fill tiles, too. Four warps do nothing but start copies of pages
of keys and values into rings of tiles in shared memory; two warp groups compute 64 rows each. While
a group's softmax runs, its product of the last weights and values and the other group's products
keep the tensor cores busy.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_LOG2_E = 1.4426950408889634
_ROWS = gl.constexpr(64)  # of a warp group
_HALF = gl.constexpr(64)  # elements of a row that one copy takes: the 128 bytes of a swizzle
_BLOCK_N = gl.constexpr(128)
_STAGES = gl.constexpr(3)
_PRODUCER_WARPS = gl.constexpr(2)  # that copy keys, and as many that copy values
# Names that differ among versions of Triton (3.6 has the older ones).
_start_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _advance(stage, phase):
    """Return the next stage of the ring and the parity of its barriers' phase."""
    last = stage == _STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _as_parts(tiles, desc, COUNT: gl.constexpr):
    """View tiles as what single copies fill: the 64-element halves of pages, halves outermost."""
    SHAPE: gl.constexpr = [COUNT, desc.block_shape[0], _HALF]
    if _REINTERPRET_IS_PUBLIC:
        return tiles.reinterpret(tiles.dtype, SHAPE, desc.layout)
    else:
        return tiles._reinterpret(tiles.dtype, SHAPE, desc.layout)


@gluon.jit
def _copy_tiles(ring, source, BLOCK_SIZE: gl.constexpr, WARP: gl.constexpr):
    """Copy this warp's half of every tile into the ring; what lies past the sequence is zeros."""
    desc, parts, full, free = ring
    table, tiles, seq_len, num_blocks, block_rows, head_row = source
    SLOTS: gl.constexpr = parts.shape[1]
    PAGES: gl.constexpr = _BLOCK_N // SLOTS
    PARTS: gl.constexpr = parts.shape[0] // _STAGES
    FIRST: gl.constexpr = WARP * PARTS // _PRODUCER_WARPS
    LAST: gl.constexpr = (WARP + 1) * PARTS // _PRODUCER_WARPS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # a fresh barrier passes for the phase before its first
    for tile in range(tiles):
        rows = ()
        for part in gl.static_range(FIRST, LAST):
            token = tile * _BLOCK_N + part % PAGES * SLOTS
            # A block past the last one reads as zeros.
            block = gl.load(table + token // BLOCK_SIZE, mask=token < seq_len, other=num_blocks)
            row = block * block_rows + head_row + token % BLOCK_SIZE
            # Gluon knows neither unpacking into a tuple nor its annotation.
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(full.index(stage), (LAST - FIRST) * SLOTS * _HALF * 2)
        for part in gl.static_range(FIRST, LAST):
            at = [rows[part - FIRST], part // PAGES * _HALF]
            _start_copy(desc, at, full.index(stage), parts.index(stage * PARTS + part))
        stage, phase = _advance(stage, phase)


@gluon.jit
def _softmax(scores, positions, first, m_i, scale_log2, MASKED: gl.constexpr):
    """One step of the online softmax: `p`, the factor for what came before, new maxima."""
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        tokens = first + gl.arange(0, _BLOCK_N, layout=columns)
        # A position past the context is past every query too.
        scores = gl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, axis=1) * scale_log2)
    p = gl.exp2(scores * scale_log2 - m_new[:, None])
    return p, gl.exp2(m_i - m_new), m_new


@gluon.jit
def _thread_sums(p):
    """Sum what each thread holds of a row: 2 of 8 columns, 4 threads; they are added up last."""
    pairs = gl.reshape(p, [_ROWS, _BLOCK_N // 8, 4, 2])
    return gl.sum(gl.sum(pairs, axis=3), axis=1)  # [_ROWS, 4]


@gluon.jit
def _start_scores(q, k_tiles, stage):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    zeros = gl.zeros([_ROWS, _BLOCK_N], gl.float32, layout=LAYOUT)
    keys = k_tiles.index(stage).permute((1, 0))
    return warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)  # [_ROWS, _BLOCK_N]


@gluon.jit
def _rescaled(acc, factor):
    """Multiply the rows of `acc` by `factor`, which may come in the layout of scores."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(factor, rows)[:, None]


@gluon.jit
def _as_operand(p, acc, dtype: gl.constexpr):
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(p.to(dtype), layout)


@gluon.jit
def _attend(
    q, keys, values, state, ring, positions, scale_log2, start, stop, tiles, MASKED: gl.constexpr
):
    """Take the tiles from `start` to `stop`: each one's scores, with the values of the last."""
    k_tiles, k_full, k_free = keys
    v_tiles, v_full, v_free = values
    p, rescale, acc, m_i, l_i = state
    stage, phase, v_stage, v_phase = ring
    for tile in range(start, stop):
        operand = _as_operand(p, acc, q.dtype)
        scores = _start_scores(q, k_tiles, stage)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        # Waits for nothing: it keeps the rescaling after the start of the scores, which hide it.
        acc, rescale = warpgroup_mma_wait(1, deps=(acc, rescale))
        acc = _rescaled(acc, rescale)
        acc = warpgroup_mma(operand, v_tiles.index(v_stage), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_free.index(stage), count=1)
        p, rescale, m_i = _softmax(scores, positions, tile * _BLOCK_N, m_i, scale_log2, MASKED)
        l_i = _rescaled(l_i, rescale) + _thread_sums(p)
        used = v_stage
        v_stage = stage
        v_phase = phase
        stage, phase = _advance(stage, phase)
        # The branch of this wait keeps the assembler from moving the softmax after the next wait:
        # the product hides the softmax here.
        mbarrier.wait(k_full.index(stage), phase, pred=tile + 1 < tiles)
        acc, p, rescale = warpgroup_mma_wait(0, deps=(acc, p, rescale))
        mbarrier.arrive(v_free.index(used), count=1)
    return (p, rescale, acc, m_i, l_i), (stage, phase, v_stage, v_phase)


@gluon.jit
def _clear_stale(parts, stage, used, HALVES: gl.constexpr):
    """Zero the KV slots past the sequence in the page that holds its end.

    They may hold NaN, and a weight of zero times NaN is NaN. Both warp groups write the same.
    """
    SLOTS: gl.constexpr = parts.shape[1]
    PAGES: gl.constexpr = _BLOCK_N // SLOTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slots = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, LAYOUT))
    if used % SLOTS != 0:
        for half in gl.static_range(HALVES):
            part = parts.index((stage * HALVES + half) * PAGES + used // SLOTS)
            part.store(gl.where((slots < used % SLOTS)[:, None], part.load(LAYOUT), 0.0))
        fence_async_shared()


@gluon.jit
def _row_pointers(tensor, query_start, row, first_head, GROUP: gl.constexpr):
    pointer, stride_row, stride_head = tensor
    token = (query_start + row // GROUP).to(gl.int64)
    head = (first_head + row % GROUP).to(gl.int64)
    return pointer + token * stride_row + head * stride_head


@gluon.jit
def _compute(
    q_tile, keys, values, v_parts, q, out, query_start, first_row, rows, context, seq_len, tiles,
    first_head, scale_log2, GROUP: gl.constexpr,
):  # fmt: skip
    """Attend with the 64 rows from `first_row`; runs in one warp group."""
    k_tiles, k_full, k_free = keys
    v_tiles, v_full, _ = values
    DIM: gl.constexpr = q_tile.shape[1]
    GLOBAL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, GLOBAL))
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, GLOBAL))
    q_rows = _row_pointers(q, query_start, row, first_head, GROUP)
    valid = (row < rows)[:, None]
    q_tile.store(gl.load(q_rows[:, None] + dims[None, :], mask=valid, other=0.0))
    fence_async_shared()

    score_rows = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
    positions = context + score_rows // GROUP
    unmasked = gl.minimum((context + first_row // GROUP + 1) // _BLOCK_N, tiles)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=(_start_scores(q_tile, k_tiles, 0),))
    mbarrier.arrive(k_free.index(0), count=1)
    lowest = gl.full([_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    p, rescale, m_i = _softmax(scores, positions, 0, lowest, scale_log2, True)
    acc = gl.zeros([_ROWS, DIM], gl.float32, layout=ACC)
    state = (p, rescale, acc, m_i, _thread_sums(p))
    stage, phase = _advance(gl.to_tensor(0), gl.to_tensor(0))
    ring = (stage, phase, gl.to_tensor(0), gl.to_tensor(0))
    mbarrier.wait(k_full.index(stage), phase, pred=tiles > 1)
    state, ring = _attend(
        q_tile, keys, values, state, ring, positions, scale_log2, 1, unmasked, tiles, False
    )
    state, ring = _attend(
        q_tile, keys, values, state, ring, positions, scale_log2, gl.maximum(unmasked, 1), tiles,
        tiles, True,
    )  # fmt: skip

    p, rescale, acc, m_i, l_i = state
    stage, phase, v_stage, v_phase = ring
    operand = _as_operand(p, acc, q_tile.dtype)
    acc = _rescaled(acc, rescale)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    used = seq_len - (tiles - 1) * _BLOCK_N
    if used < _BLOCK_N:
        _clear_stale(v_parts, v_stage, used, DIM // _HALF)
    acc = warpgroup_mma(operand, v_tiles.index(v_stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    q_tile.store(_rescaled(acc, 1.0 / gl.sum(l_i, axis=1)).to(q_tile.dtype))
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [512 // DIM, DIM // 16], [4, 1], [1, 0])
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORED))
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, STORED))
    out_rows = _row_pointers(out, query_start, row, first_head, GROUP)
    gl.store(out_rows[:, None] + dims[None, :], q_tile.load(STORED), mask=(row < rows)[:, None])


@gluon.jit(
    do_not_specialize=[
        "tables_stride",
        "num_blocks",
        "k_block_rows",
        "k_head_rows",
        "v_block_rows",
        "v_head_rows",
    ]
)
def _hopper_prefill_kernel(
    k_desc, v_desc, q_ptr, tables_ptr, cu_query_lens_ptr, seq_lens_ptr, out_ptr, scale_log2,
    q_stride_row, q_stride_head, tables_stride, out_stride_row, out_stride_head, num_blocks,
    k_block_rows, k_head_rows, v_block_rows, v_head_rows,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    kv_head = gl.program_id(0)
    sequence = gl.program_id(1)
    # The last rows have the longest context: they start first.
    first_row = (gl.num_programs(2) - 1 - gl.program_id(2)) * (2 * _ROWS)
    query_start = gl.load(cu_query_lens_ptr + sequence)
    query_len = gl.load(cu_query_lens_ptr + sequence + 1) - query_start
    rows = query_len * GROUP
    if first_row >= rows:
        return
    seq_len = gl.load(seq_lens_ptr + sequence)
    context = seq_len - query_len
    last_row = gl.minimum(first_row + 2 * _ROWS, rows) - 1
    tiles = (context + last_row // GROUP) // _BLOCK_N + 1

    dtype: gl.constexpr = q_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PARTS: gl.constexpr = _STAGES * (_BLOCK_N // k_desc.block_shape[0]) * (DIM // _HALF)
    q_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, DIM], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [_STAGES, _BLOCK_N, DIM], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [_STAGES, _BLOCK_N, DIM], TILE)
    k_parts = _as_parts(k_tiles, k_desc, PARTS)
    v_parts = _as_parts(v_tiles, v_desc, PARTS)
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(stage), count=_PRODUCER_WARPS)
        mbarrier.init(v_full.index(stage), count=_PRODUCER_WARPS)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()

    keys = (k_tiles, k_full, k_free)
    values = (v_tiles, v_full, v_free)
    q = (q_ptr, q_stride_row, q_stride_head)
    out = (out_ptr, out_stride_row, out_stride_head)
    first_head = kv_head * GROUP
    table = tables_ptr + sequence.to(gl.int64) * tables_stride
    k_ring = (k_desc, k_parts, k_full, k_free)
    v_ring = (v_desc, v_parts, v_full, v_free)
    k_source = (table, tiles, seq_len, num_blocks, k_block_rows, kv_head * k_head_rows)
    v_source = (table, tiles, seq_len, num_blocks, v_block_rows, kv_head * v_head_rows)
    gl.warp_specialize(
        [
            (_compute, (
                q_tiles.index(0), keys, values, v_parts, q, out, query_start, first_row, rows,
                context, seq_len, tiles, first_head, scale_log2, GROUP,
            )),
            (_compute, (
                q_tiles.index(1), keys, values, v_parts, q, out, query_start, first_row + _ROWS,
                rows, context, seq_len, tiles, first_head, scale_log2, GROUP,
            )),
            (_copy_tiles, (k_ring, k_source, BLOCK_SIZE, 0)),
            (_copy_tiles, (k_ring, k_source, BLOCK_SIZE, 1)),
            (_copy_tiles, (v_ring, v_source, BLOCK_SIZE, 0)),
            (_copy_tiles, (v_ring, v_source, BLOCK_SIZE, 1)),
        ],
        worker_num_warps=[4, 1, 1, 1, 1],
        worker_num_regs=[240, 24, 24, 24, 24],
    )  # fmt: skip


def is_supported(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether the kernel takes these dtypes, shapes and strides."""
    block_size, dim = k_cache.shape[2:]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and k_cache.dtype == v_cache.dtype == q.dtype
        and dim in (64, 128)
        and block_size >= 16
        and block_size & (block_size - 1) == 0
        and all(map(_is_matrix, (k_cache, v_cache)))
    )


def _is_matrix(cache: torch.Tensor) -> bool:
    """Return whether a cache's KV slots are rows of one matrix that the copy engine can address.

    It wants addresses and the rows' distance in multiples of 16 bytes, and 32-bit row numbers.
    """
    block, head, token, _ = cache.stride()
    return (
        cache.data_ptr() % 16 == 0
        and token % 8 == 0
        and block % token == head % token == 0
        and cache.shape[0] * (block // token) < 2**31
    )


def _describe(cache: torch.Tensor) -> TensorDescriptor:
    """Describe the matrix; a copy takes half of up to a tile's KV slots of a block."""
    block, _, token, _ = cache.stride()
    shape = [cache.shape[0] * (block // token), cache.shape[3]]
    part = [min(cache.shape[2], _BLOCK_N.value), _HALF.value]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache, shape, [token, 1], part, layout)


def hopper_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of packed query chunks over their paged context, on tensors that suit.

    Shapes are those of `pagewire.kernels.PagedPrefill`; see `is_supported` for the rest. The
    descriptors are parameters of the launch, so a captured CUDA graph keeps them.
    """
    heads, dim = q.shape[1:]
    num_blocks, kv_heads, block_size, _ = k_cache.shape
    group = heads // kv_heads
    row_tiles = -(-max_query_len * group // (2 * _ROWS.value))
    _hopper_prefill_kernel[(kv_heads, seq_lens.shape[0], row_tiles)](
        _describe(k_cache),
        _describe(v_cache),
        q,
        block_tables,
        cu_query_lens,
        seq_lens,
        out,
        scale * _LOG2_E,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        num_blocks,
        k_cache.stride(0) // k_cache.stride(2),
        k_cache.stride(1) // k_cache.stride(2),
        v_cache.stride(0) // v_cache.stride(2),
        v_cache.stride(1) // v_cache.stride(2),
        GROUP=group,
        DIM=dim,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )
