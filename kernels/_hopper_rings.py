# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Rings of tiles in a Hopper GPU's shared memory, which its copy engine fills from a paged cache.

A tile has the keys or the values of some positions, for one head. Producer warps only start copies:
64 elements of a page's KV slots at a time. Each stage has a barrier for a full tile, and another
one for a tile that all readers have finished.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_COLUMNS = gl.constexpr(64)  # of a row in one copy: the 128 bytes of a swizzle
_PRODUCER_WARPS = gl.constexpr(2)  # for keys, and as many for values
# Names that differ among versions of Triton (3.6 has the older ones).
_start_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of the ring and the parity of its barriers' phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _as_parts(tiles, desc, COUNT: gl.constexpr):
    """View tiles as the targets of single copies: 64 columns of a page, columns outermost."""
    SHAPE: gl.constexpr = [COUNT, desc.block_shape[0], _COLUMNS]
    if _REINTERPRET_IS_PUBLIC:
        return tiles.reinterpret(tiles.dtype, SHAPE, desc.layout)
    else:
        return tiles._reinterpret(tiles.dtype, SHAPE, desc.layout)


@gluon.jit
def copy_tiles(ring, source, BLOCK_SIZE: gl.constexpr, WARP: gl.constexpr):
    """Copy this warp's half of every tile into the ring.

    Pages past the sequence, or before the first position that a query sees, are zeros.
    """
    desc, tiles, parts, full, free = ring
    table, span, num_blocks, block_rows, head_row = source
    start, end, lowest, seq_len = span
    BLOCK_N: gl.constexpr = tiles.shape[1]
    STAGES: gl.constexpr = tiles.shape[0]
    SLOTS: gl.constexpr = parts.shape[1]
    PAGES: gl.constexpr = BLOCK_N // SLOTS
    PARTS: gl.constexpr = parts.shape[0] // STAGES
    FIRST: gl.constexpr = WARP * PARTS // _PRODUCER_WARPS
    LAST: gl.constexpr = (WARP + 1) * PARTS // _PRODUCER_WARPS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # a fresh barrier passes for the phase before its first
    for tile in range(start, end):
        rows = ()
        for part in gl.static_range(FIRST, LAST):
            token = tile * BLOCK_N + part % PAGES * SLOTS
            is_seen = (token < seq_len) & (token + SLOTS > lowest)
            # A block past the last one reads as zeros.
            block = gl.load(table + token // BLOCK_SIZE, mask=is_seen, other=num_blocks)
            row = block * block_rows + head_row + token % BLOCK_SIZE
            # Gluon supports neither unpacking into a tuple nor its annotation.
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(full.index(stage), (LAST - FIRST) * SLOTS * _COLUMNS * 2)
        for part in gl.static_range(FIRST, LAST):
            at = [rows[part - FIRST], part // PAGES * _COLUMNS]
            _start_copy(desc, at, full.index(stage), parts.index(stage * PARTS + part))
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def make_ring(desc, dtype: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
             DIM: gl.constexpr, READERS: gl.constexpr):  # fmt: skip
    """Return a ring: descriptor, tiles, their parts, barriers of full tiles and of free ones."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PARTS: gl.constexpr = STAGES * (BLOCK_N // desc.block_shape[0]) * (DIM // _COLUMNS)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=_PRODUCER_WARPS)
        mbarrier.init(free.index(stage), count=READERS)
    return desc, tiles, _as_parts(tiles, desc, PARTS), full, free


@gluon.jit
def clear_unseen(parts, tiles, stage, edge, first, stop):
    """Zero a tile's KV slots before `first` and from `stop` on, in the page that `edge` lies in.

    They may hold NaN, and a weight of zero times NaN is NaN. Each warp group does this on the
    same tile, so it must not write back what another group has already zeroed.
    """
    SLOTS: gl.constexpr = parts.shape[1]
    PAGES: gl.constexpr = tiles.shape[1] // SLOTS
    PARTS_A_ROW: gl.constexpr = tiles.shape[2] // _COLUMNS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    page = edge // SLOTS
    slots = page * SLOTS + gl.arange(0, SLOTS, layout=gl.SliceLayout(1, LAYOUT))
    is_kept = (slots >= first) & (slots < stop)
    if edge % SLOTS != 0:
        for column in gl.static_range(PARTS_A_ROW):
            part = parts.index((stage * PARTS_A_ROW + column) * PAGES + page)
            part.store(gl.where(is_kept[:, None], part.load(LAYOUT), 0.0))
        fence_async_shared()


def is_matrix(cache: torch.Tensor) -> bool:
    """Return whether a cache's KV slots are rows of one matrix that the copy engine can address.

    The engine needs addresses and row strides in multiples of 16 bytes, and 32-bit row numbers.
    The heads of a block must be within the block: rows past the last block are read as zeros.
    """
    block, head, token, _ = cache.stride()
    return (
        cache.data_ptr() % 16 == 0
        and token % 8 == 0
        and block % token == head % token == 0
        and head * cache.shape[1] <= block
        and cache.shape[0] * (block // token) < 2**31
    )


def describe(cache: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Describe the matrix; a copy takes 64 elements of up to a tile's KV slots of a block."""
    block, _, token, _ = cache.stride()
    shape = [cache.shape[0] * (block // token), cache.shape[3]]
    part = [min(cache.shape[2], block_n), _COLUMNS.value]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache, shape, [token, 1], part, layout)
