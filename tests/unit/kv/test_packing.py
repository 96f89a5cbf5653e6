from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewire.kernels.kv_staging import empty_copy_list, fill_copy_list
from pagewire.shared.kv.kv_layout import MAX_LAYER_GROUPS
from pagewire.shared.kv.packing import max_blocks, packed_bytes, pool_rows
from pagewire.tests.support.kv_layouts import kv_layout


@given(
    num_layers=st.integers(1, 200),
    size=st.integers(1, 100),
    num_blocks=st.integers(1, 100),
    data=st.data(),
)
def test_as_many_blocks_fit_staging_as_it_was_made_for(
    num_layers: int, size: int, num_blocks: int, data: st.DataObject
) -> None:
    layout = kv_layout([None] * num_layers, size=size)
    assert layout.block_bytes == num_layers * size * 4
    assert 1 <= len(layout.layer_groups) <= MAX_LAYER_GROUPS
    num_groups = data.draw(st.sampled_from([None, *range(1, len(layout.layer_groups) + 1)]))
    nbytes = packed_bytes(layout, num_blocks, num_groups)
    assert max_blocks(layout, nbytes, num_groups) == num_blocks
    assert max_blocks(layout, nbytes - 1, num_groups) == num_blocks - 1


def test_layer_groups_of_a_block_lie_next_to_each_other() -> None:
    layout = kv_layout([None] * 32)
    assert pool_rows(layout, [5, 0], layout.layer_groups).tolist() == [*range(40, 48), *range(8)]
    assert pool_rows(layout, [5, 0, 1], range(2, 3)).tolist() == [42, 2, 10]
    assert (pool_rows(layout, [-1], layout.layer_groups) < 0).all()  # checked, not written


def test_a_copy_list_has_the_number_of_rows_the_seed_and_the_rows() -> None:
    copy_list = empty_copy_list(7)
    rows = pool_rows(kv_layout([None, None]), [4, 2], range(2))
    fill_copy_list(copy_list.numpy(), rows, -(2**63))
    assert copy_list.tolist() == [4, -(2**63), 8, 9, 4, 5, 0, 0, 0]
    assert copy_list.dtype is torch.int64
