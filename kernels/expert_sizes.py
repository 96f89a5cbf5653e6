"""Sizes by which the kernels of a mixture of experts are chosen; they follow from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable

_BLOCK_PAIRS = 2048
_LEAST_ROWS = 16  # fewest rows of a matrix product
MOST_ROWS = 128


def _round_up(n: int) -> int:
    """Return the smallest power of two that is at least `n` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


def rows_of_a_tile(pairs: int, num_experts: int) -> int:
    """Return 1.5 times the average rows of an expert, so that most experts need one tile."""
    return min(max(_round_up(3 * pairs // (2 * num_experts)), _LEAST_ROWS), MOST_ROWS)


def divide_pairs(pairs: int) -> tuple[int, int]:
    """Return the pairs of a program that lists tiles, and the programs, rounded up."""
    block = min(max(_round_up(pairs), 32), _BLOCK_PAIRS)
    return block, _round_up(-(-pairs // block))


def steps_of_each_kind(numbers: Iterable[int], top_k: int, num_experts: int) -> list[int]:
    """Return the first of these numbers of tokens for each set of kernels that they need.

    Args:
        numbers: tokens of steps; see `few_experts.are_few` for fewer.
        top_k: experts of a token.
        num_experts: number of experts.
    """
    kinds: dict[object, int] = {}
    for tokens in numbers:
        pairs = tokens * top_k
        kinds.setdefault((divide_pairs(pairs), rows_of_a_tile(pairs, num_experts)), tokens)
    return list(kinds.values())
