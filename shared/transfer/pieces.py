"""How a prompt's blocks are cut into pieces."""

from __future__ import annotations

# The largest piece is so many times as large as the first and the last of a long run. While the
# first is on the wire, the second is packed and announced, which takes the host about as long as
# half a piece takes the wire. A last one that is smaller still would cost the host as much again.
_FIRST_DIVISOR = 2
_LAST_DIVISOR = 4
_LEAST_DIVIDED = 8  # blocks of the largest piece


def next_piece_size(ready: int, most: int, *, is_first: bool) -> int:
    """Return how many blocks the next piece takes.

    Where more is ready than one piece takes, the wire begins behind a smaller piece's packing and
    ends before a small one's scattering, instead of a large one's. Where the largest piece has
    fewer than eight blocks, all are as large as can be.

    Args:
        ready: blocks that can be packed, at least one.
        most: blocks of the largest piece, at least one.
        is_first: nothing of this prompt was ready before these blocks, or is being packed.
    """
    last = most // _LAST_DIVISOR
    if most < _LEAST_DIVIDED or (is_first and ready <= most):
        return min(ready, most)
    if is_first:
        return most // _FIRST_DIVISOR
    if ready > most + last:
        return most
    return ready - last if ready > 2 * last else ready


def piece_sizes(num_blocks: int, most: int) -> list[int]:
    """Return how many blocks each piece of a prompt takes whose blocks are all ready."""
    sizes: list[int] = []
    while (ready := num_blocks - sum(sizes)) > 0:
        sizes.append(next_piece_size(ready, most, is_first=not sizes))
    return sizes
