# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The rows of each program of a grouped product: pairs of token and expert, by expert.

The list is made on the device, and its length follows from shapes alone, so that one CUDA graph
serves any routing. There are no atomics: pairs of one expert are in the order of their tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options
from pagewire.kernels.expert_sizes import divide_pairs

_PAIRS_OF_A_WARP = 256


class TileList(NamedTuple):
    """Tiles of at most `rows` pairs of one expert.

    A pair is `token * top_k + choice`.

    Attributes:
        order: `[pairs]` int32, the pairs by expert.
        tiles: `[T, 3]` int32, expert, first place in `order` and the place after the last; the
            expert of an unused tile is -1.
        rows: largest number of pairs in a tile.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    rows: int


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    chosen_ptr,  # [pairs] int32
    counts_ptr,  # [blocks, BINS] int32, pairs of each expert in a block of pairs
    pairs,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(chosen_ptr + pair, mask=pair < pairs, other=0)
    counts = tl.histogram(chosen, BINS, mask=pair < pairs)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["pairs", "most_tiles"])
def _tile_list_kernel(
    chosen_ptr,  # [pairs] int32
    counts_ptr,  # as above; unused with one block
    order_ptr,  # [pairs] int32
    tiles_ptr,  # [most_tiles, 3] int32
    pairs,
    most_tiles,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Each program writes the pairs of one expert in one block of pairs."""
    expert = tl.program_id(0)
    block = tl.program_id(1)
    bins = tl.arange(0, BINS)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    await_predecessor(OVERLAPS)
    chosen = tl.load(chosen_ptr + pair, mask=pair < pairs, other=-1)
    before = 0  # pairs of this expert in earlier blocks
    if MOST_BLOCKS == 1:
        counts = tl.histogram(chosen, BINS, mask=pair < pairs)
    else:
        blocks = tl.arange(0, MOST_BLOCKS)[:, None]
        there = blocks < tl.num_programs(1)
        table = tl.load(counts_ptr + blocks * BINS + bins[None, :], mask=there, other=0)
        counts = tl.sum(table, 0)
        before = tl.sum(tl.where((blocks < block) & (bins[None, :] == expert), table, 0))
    start = tl.sum(tl.where(bins < expert, counts, 0))
    own = chosen == expert
    place = start + before + tl.cumsum(own.to(tl.int32), 0) - 1
    tl.store(order_ptr + place, pair, mask=own)
    if block == 0:
        end = start + tl.sum(tl.where(bins == expert, counts, 0))
        tile = tl.sum(tl.where(bins < expert, (counts + ROWS - 1) // ROWS, 0))
        for first in range(start, end, ROWS):
            tl.store(tiles_ptr + 3 * tile, expert)
            tl.store(tiles_ptr + 3 * tile + 1, first)
            tl.store(tiles_ptr + 3 * tile + 2, tl.minimum(first + ROWS, end))
            tile += 1
        if expert == tl.num_programs(0) - 1:
            for unused in range(tile, most_tiles):
                tl.store(tiles_ptr + 3 * unused, -1)


def most_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """Return the largest possible number of tiles, for any routing."""
    used = min(pairs, num_experts)  # experts: the last tile of each may have a single pair
    return used + (pairs - used) // rows


def list_tiles(chosen: torch.Tensor, num_experts: int, rows: int) -> TileList:
    """Return the tiles of a routing.

    Args:
        chosen: [T, top_k] int32, experts from 0 to `num_experts` - 1; T is above 0.
        num_experts: number of experts.
        rows: largest number of pairs in a tile.
    """
    chosen = chosen.contiguous()
    pairs = chosen.numel()
    length = most_tiles(pairs, num_experts, rows)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty((length, 3), dtype=torch.int32, device=chosen.device)
    bins = max(next_power_of_2(num_experts), 2)
    block, most_blocks = divide_pairs(pairs)
    blocks = triton.cdiv(pairs, block)
    warps = max(block // _PAIRS_OF_A_WARP, 4)
    counts = torch.empty((blocks, bins), dtype=torch.int32, device=chosen.device)
    if blocks > 1:
        _count_kernel[(blocks,)](chosen, counts, pairs, BINS=bins, BLOCK=block, num_warps=warps)
    _tile_list_kernel[(num_experts, blocks)](
        chosen,
        counts,
        order,
        tiles,
        pairs,
        length,
        ROWS=rows,
        BINS=bins,
        BLOCK=block,
        MOST_BLOCKS=most_blocks,
        num_warps=warps,
        **overlap_options(chosen.device, chosen.shape[0]),
    )
    return TileList(order, tiles, rows)
