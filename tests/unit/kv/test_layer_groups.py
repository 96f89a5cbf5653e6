from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels.kv_staging import empty_copy_list, fill_copy_list
from pagewire.shared.control.protocol import MAX_LAYER_GROUPS
from pagewire.shared.kv.layer_groups import LayerGroups


@pytest.mark.parametrize(
    ("num_layers", "groups"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (7, 7), (11, 1), (26, 2), (27, 3), (32, 8)],
)
def test_groups_are_equal_and_as_many_as_may_be(num_layers: int, groups: int) -> None:
    assert LayerGroups.of(num_layers, num_layers * 8) == LayerGroups(
        groups, num_layers * 8 // groups
    )


@given(
    num_layers=st.integers(1, 200),
    layer_words=st.integers(1, 100),
    num_blocks=st.integers(1, 100),
    data=st.data(),
)
def test_as_many_blocks_fit_staging_as_it_was_made_for(
    num_layers: int, layer_words: int, num_blocks: int, data: st.DataObject
) -> None:
    groups = LayerGroups.of(num_layers, num_layers * layer_words * 8)
    assert groups.block_bytes == num_layers * layer_words * 8
    assert 1 <= groups.count <= MAX_LAYER_GROUPS
    num_groups = data.draw(st.sampled_from([None, *range(1, groups.count + 1)]))
    size = groups.packed_bytes(num_blocks, num_groups)
    assert groups.max_blocks(size, num_groups) == num_blocks
    assert groups.max_blocks(size - 1, num_groups) == num_blocks - 1


@pytest.mark.parametrize(
    ("count", "ends"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (7, [3, 5, 6, 7]), (8, [4, 6, 7, 8])]
)
def test_each_range_leaves_half_of_what_is_left_and_finally_one_group(
    count: int, ends: list[int]
) -> None:
    starts = [0, *ends[:-1]]
    expected = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    assert LayerGroups(count, 8).send_ranges() == expected


def test_groups_of_a_block_lie_next_to_each_other() -> None:
    groups = LayerGroups.of(num_layers=32, block_bytes=1 << 20)
    assert groups.rows([5, 0], groups.whole).tolist() == [*range(40, 48), *range(8)]
    assert groups.rows([5, 0, 1], range(2, 3)).tolist() == [42, 2, 10]
    assert (groups.rows([-1], groups.whole) < 0).all()  # checked, not written


def test_a_copy_list_has_the_number_of_rows_the_seed_and_the_rows() -> None:
    groups = LayerGroups.of(num_layers=2, block_bytes=64)
    copy_list = empty_copy_list(7)
    rows = groups.rows([4, 2], groups.whole)
    fill_copy_list(copy_list.numpy(), rows, -(2**63))
    assert copy_list.tolist() == [4, -(2**63), 8, 9, 4, 5, 0, 0, 0]
    assert copy_list.dtype is torch.int64
