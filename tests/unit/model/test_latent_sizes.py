"""Which chunks attend to keys and values of their own instead of latent vectors."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels.latent_sizes import keys_are_cheaper, longest_absorbed, workspace_tokens

DEEPSEEK = (128, 128, 512, 64)  # numbers of a key, a value, a latent vector and a rotated key


def products(length: int, context: int, sizes: tuple[int, int, int, int]) -> tuple[float, float]:
    """Count the products of a head in both forms, query by query."""
    key, value, rank, rotated = sizes
    pairs = sum(2 * position - 1 for position in range(context - length + 1, context + 1)) / 2
    made = context * rank * (key + value) + pairs * (key + rotated + value)
    return made, pairs * (rank + rotated + rank)


@given(
    st.tuples(*[st.integers(1, 600)] * 4),
    st.integers(1, 400),
    st.integers(0, 4000),
    st.integers(1, 3),
)
def test_the_form_with_fewer_products_is_taken(sizes, length, prefix, count) -> None:
    made, absorbed = products(length, prefix + length, sizes)
    chunks = [(length, prefix + length)] * count
    is_long = length > longest_absorbed(*sizes[:3])
    assert keys_are_cheaper(chunks, *sizes) == (is_long and made < absorbed)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 600), st.integers(1, 80))
def test_the_longest_chunk_that_is_absorbed(key, value, rank, rotated) -> None:
    longest = longest_absorbed(key, value, rank)
    if longest == sys.maxsize:
        assert not keys_are_cheaper([(10**6, 10**6)], key, value, rank, rotated)
    else:
        assert not keys_are_cheaper([(longest, longest)], key, value, rank, rotated)
        assert keys_are_cheaper([(longest + 1, longest + 1)], key, value, rank, rotated)


def test_sizes_of_deepseek() -> None:
    assert longest_absorbed(*DEEPSEEK[:3]) == 341
    assert keys_are_cheaper([(342, 10**9)], *DEEPSEEK)
    assert not keys_are_cheaper([(341, 10**9)], *DEEPSEEK), "though it multiplies less"
    assert not keys_are_cheaper([(300, 300)] * 30, *DEEPSEEK)
    assert keys_are_cheaper([(2000, 2000), (50, 50)], *DEEPSEEK)
    assert workspace_tokens(16, 128, 128, 2) == 16384
