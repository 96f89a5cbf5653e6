"""Sizes by which the kernels of a mixture of experts are chosen; they follow from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable

_BLOCK_PAIRS = 2048
_LEAST_ROWS = 16  # fewest rows of a matrix product
MOST_ROWS = 128


def _round_up(n: int) -> int:
    """Return the smallest power of two that is at least `n` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


def rows_of_a_tile(pairs: int, num_experts: int, most: int = MOST_ROWS) -> int:
    """Return 1.5 times the average rows of an expert, so that most experts need one tile."""
    return min(max(_round_up(3 * pairs // (2 * num_experts)), _LEAST_ROWS), most)


def rows_in_four_bits(pairs: int, num_experts: int) -> int:
    """Return the rows of a tile with weights in four bits, which each tile dequantises again."""
    rows = rows_of_a_tile(pairs, num_experts, most=4 * MOST_ROWS)
    return min(max(rows // 2, MOST_ROWS), rows)


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
        rows = rows_of_a_tile(pairs, num_experts), rows_in_four_bits(pairs, num_experts)
        kinds.setdefault((divide_pairs(pairs), *rows), tokens)
    return list(kinds.values())
