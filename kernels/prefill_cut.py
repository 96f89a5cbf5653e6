"""Divides the work of prefill attention on a Hopper GPU: rows of a program, parts of a context."""

from __future__ import annotations

from typing import NamedTuple

ROWS = 64  # of a warp group
# Positions of a context. If block tables hold no more, it is faster whole than combined from parts.
LONGEST_WHOLE = 2048
LEAST_PART = 512  # positions
_MOST_PARTS = 32


class Tiles(NamedTuple):
    """Sizes of a program; its rings of keys and values fill what shared memory its rows leave."""

    warp_groups: int  # of 64 rows each
    block_n: int  # positions of a tile
    stages: int  # tiles of a ring


# By head dimension, the fewest rows first. A warp group holds the scores and `acc` of 64 rows in
# registers: more groups have fewer each, and a wider head leaves fewer for scores.
TILES = {
    64: (Tiles(1, 128, 3), Tiles(2, 128, 3), Tiles(3, 64, 4)),
    128: (Tiles(1, 128, 3), Tiles(2, 128, 3)),
    256: (Tiles(1, 64, 2), Tiles(2, 64, 2)),
}


# By the warp groups of a program: its time for as many positions, relative to a single group's, as
# groups hide each other's softmax; and, in the same unit for a whole context, what it takes longer
# to start and to end. Fitted to twelve chunks and contexts of five shapes on an H100.
_TIMES = {1: (1.0, 0.0), 2: (1.5, 0.04), 3: (2.1, 0.08)}


def choose_cut(dim: int, rows: int, grids: int, longest: int, sms: int) -> tuple[Tiles, int]:
    """Return the tiles, and the largest number of parts of each context.

    Programs that all run at once leave SMs, for further parts or for fewer rows each. Where no
    tiles do, the largest have the highest throughput, and contexts stay whole.

    Args:
        dim: dimension of a head.
        rows: rows of the longest chunk, counted as in `paged_prefill_hopper`.
        grids: sequences times key/value heads.
        longest: positions that the block tables can hold.
        sms: streaming multiprocessors of the device; each runs one program.
    """

    def programs(tiles: Tiles) -> int:
        return grids * -(-rows // (tiles.warp_groups * ROWS))

    def parts(tiles: Tiles) -> int:
        most = 1 if longest <= LONGEST_WHOLE else _MOST_PARTS
        return min(sms // programs(tiles), most)

    def cost(tiles: Tiles) -> float:
        time, overhead = _TIMES[tiles.warp_groups]
        return time / parts(tiles) + overhead

    fitting = [tiles for tiles in TILES[dim] if programs(tiles) <= sms]
    if not fitting:
        return TILES[dim][-1], 1
    best = min(fitting, key=cost)
    return best, parts(best)
