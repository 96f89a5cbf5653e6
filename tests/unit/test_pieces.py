from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.transfer.pieces import next_piece_size, piece_sizes


@given(num_blocks=st.integers(1, 1000), most=st.integers(1, 200))
def test_pieces_take_all_blocks_and_fit(num_blocks: int, most: int) -> None:
    sizes = piece_sizes(num_blocks, most)
    assert sum(sizes) == num_blocks
    assert all(1 <= size <= most for size in sizes)
    assert len(sizes) <= num_blocks // most + 3


@pytest.mark.parametrize(
    ("num_blocks", "most", "sizes"),
    [
        (128, 128, [128]),
        (8, 128, [8]),
        (512, 128, [64, 128, 128, 128, 64]),
        (129, 128, [64, 33, 32]),
        (540, 128, [64, 128, 128, 128, 60, 32]),
        (5, 1, [1] * 5),
        (5, 2, [2, 2, 1]),
        (20, 7, [7, 7, 6]),
        (20, 8, [4, 8, 6, 2]),
    ],
)
def test_a_long_run_begins_with_half_a_piece_and_ends_with_a_small_one(
    num_blocks: int, most: int, sizes: list[int]
) -> None:
    assert piece_sizes(num_blocks, most) == sizes


def test_only_what_begins_a_long_run_is_half_a_piece() -> None:
    assert next_piece_size(128, 128, is_first=True) == 128
    assert next_piece_size(400, 128, is_first=False) == 128
