# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged prefill attention for Hopper GPUs, in Gluon.

A program takes 64 to 192 rows of one sequence and key/value head; a row is a (token, query head of
the group) pair, so that short chunks fill tiles, too. Four producer warps start copies of
pages of keys and values into rings of tiles in shared memory; one to three warp groups compute 64
rows each. While a group's softmax runs, its product of the last weights and values and the other
groups' products keep the tensor cores busy.

Only tiles across the diagonal, or across the start of a window, compare positions. Blocks
before all windows of a program are not copied, nor are their entries in the block table read.

Short chunks on long contexts would leave SMs idle: there the context is split, see
`_prefill_splits`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pagewire.kernels._hopper_rings import (
    advance,
    clear_unseen,
    copy_tiles,
    describe,
    is_matrix,
    make_ring,
)
from pagewire.kernels._hopper_rows import (
    find_chunk,
    row_pointers,
    softmax,
    store_out,
    store_split,
    thread_sums,
)
from pagewire.kernels._launch import sm_count
from pagewire.kernels._prefill_splits import combine_prefill_splits
from pagewire.kernels._scores import LOG2_E
from pagewire.kernels.prefill_tiles import (
    LEAST_SPLIT,
    ROWS,
    TILES,
    LaunchRows,
    choose_tiles_and_splits,
)

_LOG2_E = gl.constexpr(LOG2_E)
_ROWS = gl.constexpr(ROWS)  # of a warp group


@gluon.jit
def _start_scores(q, k_tiles, stage):
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout=LAYOUT)
    keys = k_tiles.index(stage).permute((1, 0))
    return warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)  # [_ROWS, BLOCK_N]


@gluon.jit
def _rescaled(acc, factor):
    """Multiply the rows of `acc` by `factor`, which may come in the layout of scores."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(factor, rows)[:, None]


@gluon.jit
def _probabilities_operand(p, acc, dtype: gl.constexpr):
    layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(p.to(dtype), layout)


@gluon.jit
def _attend(
    q, keys, values, state, ring, positions, scale, start, stop, end, options,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Process tiles from `start` to `stop`: a tile's scores with the last tile's values."""
    k_tiles, k_full, k_free = keys
    v_tiles, v_full, v_free = values
    STAGES: gl.constexpr = k_tiles.shape[0]
    p, rescale, acc, m_i, l_i = state
    stage, phase, v_stage, v_phase = ring
    for tile in range(start, stop):
        operand = _probabilities_operand(p, acc, q.dtype)
        scores = _start_scores(q, k_tiles, stage)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        # This never waits: it orders the rescaling after the start of the scores, which hide it.
        acc, rescale = warpgroup_mma_wait(1, deps=(acc, rescale))
        acc = _rescaled(acc, rescale)
        acc = warpgroup_mma(operand, v_tiles.index(v_stage), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_free.index(stage), count=1)
        p, rescale, m_i = softmax(scores, positions, tile, m_i, scale, options, MASKED)
        l_i = _rescaled(l_i, rescale) + thread_sums(p)
        used = v_stage
        v_stage = stage
        v_phase = phase
        stage, phase = advance(stage, phase, STAGES)
        # The branch of this wait keeps the assembler from moving the softmax after the next wait:
        # the product hides the softmax here.
        mbarrier.wait(k_full.index(stage), phase, pred=tile + 1 < end)
        acc, p, rescale = warpgroup_mma_wait(0, deps=(acc, p, rescale))
        mbarrier.arrive(v_free.index(used), count=1)
    return (p, rescale, acc, m_i, l_i), (stage, phase, v_stage, v_phase)


@gluon.jit
def _compute(
    buffers, tensors, span, chunk, scale, options, NUMBER: gl.constexpr, GROUP: gl.constexpr
):
    """Compute attention for 64 of the program's rows, in the warp group of this number."""
    q_tiles, keys, values, v_parts = buffers
    q, out, split_out, is_whole, sinks_ptr = tensors
    start, end, lowest, seq_len = span
    query_start, program_row, rows, context, first_head = chunk
    WINDOW: gl.constexpr = options[0]
    HAS_SINKS: gl.constexpr = options[2]
    IS_SPLIT: gl.constexpr = options[3]
    k_tiles, k_full, k_free = keys
    v_tiles, v_full, _ = values
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    STAGES: gl.constexpr = k_tiles.shape[0]
    DIM: gl.constexpr = k_tiles.shape[2]
    GLOBAL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    first_row = program_row + NUMBER * _ROWS
    q_tile = q_tiles.index(NUMBER)
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, GLOBAL))
    row = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, GLOBAL))
    q_rows = row_pointers(q, query_start, row, first_head, GROUP)
    valid = (row < rows)[:, None]
    q_tile.store(gl.load(q_rows[:, None] + dims[None, :], mask=valid, other=0.0))
    fence_async_shared()

    queries = q_tile
    if DIM == 64 and BLOCK_N == 64:
        # From shared memory, 64 queries and 64 keys take as long to read as their product takes.
        queries = q_tile.load(gl.DotOperandLayout(0, SCORES, 2))

    score_rows = first_row + gl.arange(0, _ROWS, layout=ROW)
    positions = context + score_rows // GROUP
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=(_start_scores(queries, k_tiles, 0),))
    mbarrier.arrive(k_free.index(0), count=1)
    m_i = gl.full([_ROWS], float("-inf"), gl.float32, layout=ROW)
    p, rescale, m_i = softmax(scores, positions, start, m_i, scale, options, True)
    acc = gl.zeros([_ROWS, DIM], gl.float32, layout=ACC)
    state = (p, rescale, acc, m_i, thread_sums(p))
    stage, phase = advance(gl.to_tensor(0), gl.to_tensor(0), STAGES)
    ring = (stage, phase, gl.to_tensor(0), gl.to_tensor(0))
    mbarrier.wait(k_full.index(stage), phase, pred=start + 1 < end)
    # All rows see all positions of the tiles from `inner` to `unmasked`, at the diagonal.
    inner = start + 1
    unmasked = gl.minimum((context + first_row // GROUP + 1) // BLOCK_N, end)
    if WINDOW > 0:
        mbarrier.wait(v_full.index(0), 0)
        seen = gl.maximum(lowest - start * BLOCK_N, 0)  # 0 in later splits: the whole tile
        # The sequence's end may lie in this page, too, and another group may be past its clearing.
        clear_unseen(v_parts, v_tiles, 0, seen, seen, seq_len - start * BLOCK_N)
        last_lowest = context + (first_row + _ROWS - 1) // GROUP - WINDOW + 1
        inner = gl.maximum(gl.minimum((last_lowest + BLOCK_N - 1) // BLOCK_N, end), inner)
        state, ring = _attend(
            queries, keys, values, state, ring, positions, scale, start + 1, inner, end, options,
            True,
        )  # fmt: skip
    unmasked = gl.maximum(unmasked, inner)
    state, ring = _attend(
        queries, keys, values, state, ring, positions, scale, inner, unmasked, end, options, False
    )
    state, ring = _attend(
        queries, keys, values, state, ring, positions, scale, unmasked, end, end, options, True
    )

    p, rescale, acc, m_i, l_i = state
    stage, phase, v_stage, v_phase = ring
    operand = _probabilities_operand(p, acc, q_tile.dtype)
    acc = _rescaled(acc, rescale)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    used = seq_len - (end - 1) * BLOCK_N
    if used < BLOCK_N:
        clear_unseen(v_parts, v_tiles, v_stage, used, 0, used)
    acc = warpgroup_mma(operand, v_tiles.index(v_stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.sum(l_i, axis=1)
    if HAS_SINKS or IS_SPLIT:
        total = gl.convert_layout(total, ROW)
    if HAS_SINKS:
        heads = first_head + score_rows % GROUP
        sinks = gl.load(sinks_ptr + heads).to(gl.float32) * _LOG2_E
        # See `sink_weight`.
        weights = gl.exp2(gl.minimum(sinks - m_i, 126.0))
        total += gl.where(is_whole, weights, 0.0) if IS_SPLIT else weights
    if IS_SPLIT:
        total = gl.where(total > 0, total, 1.0)  # a row may see nothing of a split
    acc = _rescaled(acc, 1.0 / total)
    if IS_SPLIT:
        if is_whole:
            store_out(acc, q_tile, out, first_row, chunk, GROUP)
        else:
            store_split(acc, m_i + gl.log2(total), split_out, first_row, chunk, GROUP)
    else:
        store_out(acc, q_tile, out, first_row, chunk, GROUP)


@gluon.jit(
    do_not_specialize=[
        "tables_stride",
        "num_blocks",
        "k_block_rows",
        "k_head_rows",
        "v_block_rows",
        "v_head_rows",
        "tokens",
        "chunks",
        "splits",
        "least",
    ]
)
def _hopper_prefill_kernel(
    k_desc, v_desc, q_ptr, tables_ptr, cu_query_lens_ptr, seq_lens_ptr, out_ptr, sinks_ptr, scale,
    q_stride_row, q_stride_head, tables_stride, out_stride_row, out_stride_head, num_blocks,
    k_block_rows, k_head_rows, v_block_rows, v_head_rows, partial_ptr, lse_ptr, tokens, chunks,
    splits, least,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr, IS_SPLIT: gl.constexpr,
):  # fmt: skip
    kv_head = gl.program_id(0)
    tile = gl.program_id(1)
    number = 0  # index of the split
    if IS_SPLIT:
        number = tile % splits
        tile = tile // splits
    SIZE: gl.constexpr = WARP_GROUPS * _ROWS
    sequence, tile = find_chunk(cu_query_lens_ptr, tile, chunks, SIZE, GROUP)
    query_start = gl.load(cu_query_lens_ptr + sequence)
    query_len = gl.load(cu_query_lens_ptr + sequence + 1) - query_start
    rows = query_len * GROUP
    # The last rows of a chunk have the longest context: they start first.
    first_row = ((rows + SIZE - 1) // SIZE - 1 - tile) * SIZE
    if first_row < 0:
        return
    seq_len = gl.load(seq_lens_ptr + sequence)
    context = seq_len - query_len
    last_row = gl.minimum(first_row + SIZE, rows) - 1
    end = (context + last_row // GROUP) // BLOCK_N + 1
    lowest = gl.to_tensor(0)
    if WINDOW > 0:
        lowest = gl.maximum(context + first_row // GROUP - WINDOW + 1, 0)
    start = lowest // BLOCK_N
    is_whole = True
    if IS_SPLIT:
        used = gl.maximum(gl.minimum(splits, (end - start) // least), 1)
        length = (end - start + used - 1) // used
        is_whole = used == 1
        start += number * length
        if start >= end:
            return
        end = gl.minimum(start + length, end)

    dtype: gl.constexpr = q_ptr.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [WARP_GROUPS, _ROWS, DIM], TILE)
    k_ring = make_ring(k_desc, dtype, STAGES, BLOCK_N, DIM, WARP_GROUPS)
    v_ring = make_ring(v_desc, dtype, STAGES, BLOCK_N, DIM, WARP_GROUPS)
    fence_async_shared()

    _, k_tiles, _, k_full, k_free = k_ring
    _, v_tiles, v_parts, v_full, v_free = v_ring
    buffers = (q_tiles, (k_tiles, k_full, k_free), (v_tiles, v_full, v_free), v_parts)
    q = (q_ptr, q_stride_row, q_stride_head)
    out = (out_ptr, out_stride_row, out_stride_head)
    heads = gl.num_programs(0) * GROUP
    cells = (number * tokens).to(gl.int64) * heads if IS_SPLIT else 0
    split_out = ((partial_ptr + cells * DIM, heads * DIM, DIM), (lse_ptr + cells, heads, 1))
    tensors = (q, out, split_out, is_whole, sinks_ptr)
    span = (start, end, lowest, seq_len)
    chunk = (query_start, first_row, rows, context, kv_head * GROUP)
    options: gl.constexpr = (WINDOW, CAP, HAS_SINKS, IS_SPLIT)
    table = tables_ptr + sequence.to(gl.int64) * tables_stride
    k_source = (table, span, num_blocks, k_block_rows, kv_head * k_head_rows)
    v_source = (table, span, num_blocks, v_block_rows, kv_head * v_head_rows)
    if WARP_GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (buffers, tensors, span, chunk, scale, options, 0, GROUP)),
                (copy_tiles, (k_ring, k_source, BLOCK_SIZE, 0)),
                (copy_tiles, (k_ring, k_source, BLOCK_SIZE, 1)),
                (copy_tiles, (v_ring, v_source, BLOCK_SIZE, 0)),
                (copy_tiles, (v_ring, v_source, BLOCK_SIZE, 1)),
            ],
            worker_num_warps=[1, 1, 1, 1],
            worker_num_regs=[24, 24, 24, 24],
        )
    elif WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (buffers, tensors, span, chunk, scale, options, 0, GROUP)),
                (_compute, (buffers, tensors, span, chunk, scale, options, 1, GROUP)),
                (copy_tiles, (k_ring, k_source, BLOCK_SIZE, 0)),
                (copy_tiles, (k_ring, k_source, BLOCK_SIZE, 1)),
                (copy_tiles, (v_ring, v_source, BLOCK_SIZE, 0)),
                (copy_tiles, (v_ring, v_source, BLOCK_SIZE, 1)),
            ],
            worker_num_warps=[4, 1, 1, 1, 1],
            worker_num_regs=[240, 24, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (buffers, tensors, span, chunk, scale, options, 0, GROUP)),
                (_compute, (buffers, tensors, span, chunk, scale, options, 1, GROUP)),
                (_compute, (buffers, tensors, span, chunk, scale, options, 2, GROUP)),
                (copy_tiles, (k_ring, k_source, BLOCK_SIZE, 0)),
                (copy_tiles, (k_ring, k_source, BLOCK_SIZE, 1)),
                (copy_tiles, (v_ring, v_source, BLOCK_SIZE, 0)),
                (copy_tiles, (v_ring, v_source, BLOCK_SIZE, 1)),
            ],
            worker_num_warps=[4, 4, 1, 1, 1, 1],
            worker_num_regs=[160, 160, 24, 24, 24, 24],
        )


def is_supported(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether the kernel takes these dtypes, shapes and strides."""
    return (
        k_cache.dtype == v_cache.dtype == q.dtype
        and has_tiles(q.dtype, *k_cache.shape[2:])
        and all(map(is_matrix, (k_cache, v_cache)))
    )


def has_tiles(dtype: torch.dtype, block_size: int, dim: int) -> bool:
    """Return whether the kernel takes contiguous blocks of some tokens and numbers of a head."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and dim in TILES
        and block_size >= 16
        and block_size & (block_size - 1) == 0
    )


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
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of packed query chunks over their paged context, on supported tensors.

    Shapes are those of `pagewire.kernels.PagedPrefill`; see `is_supported` for the rest. The
    descriptors are parameters of the launch, so a captured CUDA graph keeps them.
    """
    heads, dim = q.shape[1:]
    num_blocks, kv_heads, block_size, _ = k_cache.shape
    group = heads // kv_heads
    chunks = seq_lens.shape[0]
    most_rows = min(len(q), chunks * max_query_len) * group
    rows = LaunchRows(most_rows, max_query_len * group, chunks)
    longest = block_tables.shape[1] * block_size
    if window:
        longest = min(longest, window + max_query_len)
    sms = sm_count(q.device)
    tiles, splits = choose_tiles_and_splits(dim, rows, kv_heads, longest, sms)
    least = LEAST_SPLIT // tiles.block_n
    partial = lse = q  # unused without splits
    if splits > 1:
        cells = (splits, len(q), heads)
        partial = torch.empty((*cells, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(cells, dtype=torch.float32, device=q.device)
    size = tiles.warp_groups * ROWS
    _hopper_prefill_kernel[(kv_heads, rows.tiles(size) * splits)](
        describe(k_cache, tiles.block_n),
        describe(v_cache, tiles.block_n),
        q,
        block_tables,
        cu_query_lens,
        seq_lens,
        out,
        q if sinks is None else sinks,
        scale * LOG2_E,
        *q.stride()[:2],
        block_tables.stride(0),
        *out.stride()[:2],
        num_blocks,
        k_cache.stride(0) // k_cache.stride(2),
        k_cache.stride(1) // k_cache.stride(2),
        v_cache.stride(0) // v_cache.stride(2),
        v_cache.stride(1) // v_cache.stride(2),
        partial,
        lse,
        len(q),
        chunks,
        splits,
        least,
        GROUP=group,
        DIM=dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=tiles.block_n,
        STAGES=tiles.stages,
        WARP_GROUPS=tiles.warp_groups,
        WINDOW=window or 0,
        CAP=(soft_cap or 0.0) * LOG2_E,
        HAS_SINKS=sinks is not None,
        IS_SPLIT=splits > 1,
        num_warps=4,
    )
    if splits > 1:
        combine_prefill_splits(
            partial,
            lse,
            cu_query_lens,
            seq_lens,
            max_query_len,
            out,
            group=group,
            rows=size,
            tile=tiles.block_n,
            least=least,
            window=window or 0,
            sinks=sinks,
        )
