"""How chunks attend to latent vectors, by sizes alone; torch is not imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

WORKSPACE_BYTES = 128 << 20  # for the keys and values that `latent_prefill` makes at a time


def workspace_tokens(heads: int, key_dim: int, value_dim: int, element_size: int) -> int:
    """Return the tokens whose keys and values are made at a time."""
    return max(1, WORKSPACE_BYTES // (heads * (key_dim + value_dim) * element_size))


def keys_are_cheaper(
    chunks: Sequence[tuple[int, int]], key_dim: int, value_dim: int, rank: int, rotated: int
) -> bool:
    """Return whether chunks multiply fewer numbers if keys and values are made first.

    Only if one of them is longer than `longest_absorbed`, whatever prefixes they have: so the first
    step of an engine, whose chunk has none, shows what later ones need.

    Args:
        chunks: length and context of each.
        key_dim: numbers of a head's key that are not rotated.
        value_dim: numbers of a head's value.
        rank: numbers of a latent vector.
        rotated: numbers of a rotated key.
    """
    longest = longest_absorbed(key_dim, value_dim, rank)
    if all(length <= longest for length, _ in chunks):
        return False
    pairs = sum(length * (context - length / 2) for length, context in chunks)
    tokens = sum(context for _, context in chunks)
    head = key_dim + value_dim
    return tokens * rank * head + pairs * (head + rotated) < pairs * (2 * rank + rotated)


def longest_absorbed(key_dim: int, value_dim: int, rank: int) -> int:
    """Return the longest chunk without a prefix for which keys and values are not made."""
    head, saved = key_dim + value_dim, 2 * rank - key_dim - value_dim
    return 2 * rank * head // saved if saved > 0 else sys.maxsize
