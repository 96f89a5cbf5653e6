"""Divides the work of prefill attention on a Hopper GPU: rows of a program, splits of a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

ROWS = 64  # rows of a warp group
# Positions of a context. If block tables hold no more, splits cost more than they gain.
LONGEST_UNSPLIT = 2048
LEAST_SPLIT = 512  # positions of a split
LEAST_COPIED = 256  # tokens of a chunk that reads copies of a cache in FP8
_MOST_SPLITS = 32


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


# By the warp groups of a program: its time for a context, relative to that of one group, because
# groups hide each other's softmax; and what it takes longer to start and end, in the same unit.
# Fitted to twelve chunks and contexts of five shapes on an H100.
_TIMES = {1: (1.0, 0.0), 2: (1.5, 0.04), 3: (2.1, 0.08)}


class LaunchRows(NamedTuple):
    """The rows of a launch, counted as in `paged_prefill_hopper`."""

    total: int  # rows of all chunks, at most
    longest: int  # rows of one chunk, at most
    chunks: int

    def tiles(self, size: int) -> int:
        """Return how many tiles of this size hold every chunk's rows, however long each is.

        Chunk i begins with tile `i + (rows before it) // size`, so a chunk may have one tile more
        than its rows need.
        """
        return -(-self.total // size) if self.chunks == 1 else self.total // size + self.chunks

    def used_tiles(self, size: int) -> int:
        """Return the largest number of tiles of this size that have rows."""
        return min(self.tiles(size), self.chunks * -(-self.longest // size))


MOST_KINDS = max(map(len, TILES.values()))
_forced: list[tuple[int, bool]] = []  # the last one counts


@contextmanager
def forced(number: int, is_split: bool) -> Iterator[None]:
    """Have launches take these tiles whatever fits, so that their kernels are compiled.

    Args:
        number: index of the tiles in `TILES`; the last ones if there are fewer.
        is_split: whether contexts are split that may ever be.
    """
    _forced.append((number, is_split))
    try:
        yield
    finally:
        _forced.pop()


def choose_tiles_and_splits(
    dim: int, rows: LaunchRows, heads: int, longest: int, sms: int
) -> tuple[Tiles, int]:
    """Return the tiles, and the largest number of splits of each context.

    If all programs run at once and SMs are left, contexts are split, or programs get fewer rows.
    Otherwise the largest tiles have the highest throughput, and contexts stay whole.

    Args:
        dim: dimension of a head.
        rows: rows of the chunks.
        heads: key/value heads.
        longest: most positions that the queries of a chunk may see.
        sms: streaming multiprocessors of the device; each runs one program.
    """

    def programs(tiles: Tiles) -> int:
        return heads * rows.used_tiles(tiles.warp_groups * ROWS)

    def splits(tiles: Tiles) -> int:
        most = 1 if longest <= LONGEST_UNSPLIT else _MOST_SPLITS
        return min(sms // programs(tiles), most)

    def cost(tiles: Tiles) -> float:
        time, overhead = _TIMES[tiles.warp_groups]
        return time / splits(tiles) + overhead

    if _forced:
        number, is_split = _forced[-1]
        return TILES[dim][: number + 1][-1], 2 if is_split and longest > LONGEST_UNSPLIT else 1
    fitting = [tiles for tiles in TILES[dim] if programs(tiles) <= sms]
    if not fitting:
        return TILES[dim][-1], 1
    best = min(fitting, key=cost)
    return best, splits(best)
