# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Which rows the programs of a grouped product take: pairs of token and expert, by expert.

The list is made on the device, and its length follows from shapes alone, so that one CUDA graph
serves any routing. Without atomics: pairs of one expert are in the order of their tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options

_BLOCK_PAIRS = 4096
_PAIRS_OF_A_WARP = 256


class TileList(NamedTuple):
    """Tiles of at most `rows` pairs of one expert.

    A pair is `token * top_k + choice`.

    Attributes:
        order: `[pairs]` int32, the pairs by expert.
        tiles: `[T, 3]` int32, expert, first place in `order` and the place after the last; the
            expert of an unused tile is -1.
        rows: the most of a tile.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    rows: int


@triton.jit
def _tile_list_kernel(
    chosen_ptr,  # [pairs] int32
    order_ptr,  # [pairs] int32
    tiles_ptr,  # [most_tiles, 3] int32
    pairs,
    most_tiles,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Each program counts all pairs, and then writes those of its own expert."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    block = tl.arange(0, BLOCK)
    await_predecessor(OVERLAPS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for first in range(0, pairs, BLOCK):
        seen = first + block < pairs
        chosen = tl.load(chosen_ptr + first + block, mask=seen, other=0)
        counts += tl.histogram(chosen, BINS, mask=seen)
    tiles_of = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(bins < expert, counts, 0))
    end = start + tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, tiles_of, 0))
    for place in range(start, end, ROWS):
        tl.store(tiles_ptr + 3 * tile, expert)
        tl.store(tiles_ptr + 3 * tile + 1, place)
        tl.store(tiles_ptr + 3 * tile + 2, tl.minimum(place + ROWS, end))
        tile += 1
    if expert == tl.num_programs(0) - 1:
        for unused in range(tile, most_tiles):
            tl.store(tiles_ptr + 3 * unused, -1)
    place = start
    for first in range(0, pairs, BLOCK):
        pair = first + block
        own = tl.load(chosen_ptr + pair, mask=pair < pairs, other=-1) == expert
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order_ptr + place + rank - 1, pair, mask=own)
        place += tl.sum(own.to(tl.int32))


def most_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """Return how many tiles there are at most, however the pairs are spread over the experts."""
    used = min(pairs, num_experts)  # experts: the last tile of each may have a single pair
    return used + (pairs - used) // rows


def list_tiles(chosen: torch.Tensor, num_experts: int, rows: int) -> TileList:
    """Return the tiles of a routing.

    Args:
        chosen: [T, top_k] int32, experts from 0 to `num_experts` - 1; T is above 0.
        num_experts: of which each token chooses.
        rows: of a tile, at most.
    """
    chosen = chosen.contiguous()
    pairs = chosen.numel()
    length = most_tiles(pairs, num_experts, rows)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty((length, 3), dtype=torch.int32, device=chosen.device)
    block = min(max(next_power_of_2(pairs), 32), _BLOCK_PAIRS)
    _tile_list_kernel[(num_experts,)](
        chosen,
        order,
        tiles,
        pairs,
        length,
        ROWS=rows,
        BINS=max(next_power_of_2(num_experts), 2),
        BLOCK=block,
        num_warps=max(block // _PAIRS_OF_A_WARP, 4),
        **overlap_options(chosen.device, chosen.shape[0]),
    )
    return TileList(order, tiles, rows)
