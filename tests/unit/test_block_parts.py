from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels.kv_staging import empty_order, fill_order
from pagewire.shared.control.protocol import MAX_PARTS
from pagewire.shared.kv.parts import BlockParts


@pytest.mark.parametrize(
    ("num_layers", "parts"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (7, 7), (11, 1), (26, 2), (27, 3), (32, 8)],
)
def test_parts_are_equal_and_as_many_as_may_be(num_layers: int, parts: int) -> None:
    assert BlockParts.of(num_layers, num_layers * 8) == BlockParts(parts, num_layers * 8 // parts)


@given(
    num_layers=st.integers(1, 200),
    layer_words=st.integers(1, 100),
    num_blocks=st.integers(1, 100),
    data=st.data(),
)
def test_as_many_blocks_fit_staging_as_it_was_made_for(
    num_layers: int, layer_words: int, num_blocks: int, data: st.DataObject
) -> None:
    parts = BlockParts.of(num_layers, num_layers * layer_words * 8)
    assert parts.block_bytes == num_layers * layer_words * 8
    assert 1 <= parts.count <= MAX_PARTS
    num_parts = data.draw(st.sampled_from([None, *range(1, parts.count + 1)]))
    size = parts.packed_bytes(num_blocks, num_parts)
    assert parts.max_blocks(size, num_parts) == num_blocks
    assert parts.max_blocks(size - 1, num_parts) == num_blocks - 1


@pytest.mark.parametrize(
    ("count", "ends"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (7, [3, 5, 6, 7]), (8, [4, 6, 7, 8])]
)
def test_halvings_leave_half_of_what_is_left_and_at_last_one_part(
    count: int, ends: list[int]
) -> None:
    starts = [0, *ends[:-1]]
    expected = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    assert BlockParts(count, 8).halvings() == expected


def test_parts_of_a_block_lie_beside_each_other() -> None:
    parts = BlockParts.of(num_layers=32, block_bytes=1 << 20)
    assert parts.rows([5, 0], parts.whole).tolist() == [*range(40, 48), *range(8)]
    assert parts.rows([5, 0, 1], range(2, 3)).tolist() == [42, 2, 10]
    assert (parts.rows([-1], parts.whole) < 0).all()  # checked, not written


def test_an_order_says_how_many_rows_which_seed_and_which_rows() -> None:
    parts = BlockParts.of(num_layers=2, block_bytes=64)
    order = empty_order(7)
    rows = parts.rows([4, 2], parts.whole)
    fill_order(order.numpy(), rows, -(2**63))
    assert order.tolist() == [4, -(2**63), 8, 9, 4, 5, 0, 0, 0]
    assert order.dtype is torch.int64
