"""Layouts: which layers share blocks, what of a sequence is kept, and what can be found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.shared.kv.block_hash import BlockHash
from pagewire.shared.kv.block_pool import BlockPool
from pagewire.shared.kv.block_table import NO_BLOCK, BlockTable
from pagewire.tests.support.kv_layouts import kv_layout

HASHES = [BlockHash(bytes([n])) for n in range(40)]
WINDOWS = st.lists(st.sampled_from([None, 1, 3, 8, 20]), min_size=1, max_size=12)


def every(nth: int, num_layers: int, window: int) -> list[int | None]:
    """A window in all layers but each `nth`."""
    return [None if (layer + 1) % nth == 0 else window for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "kinds", "rows"),
    [
        ([None] * 32, [None], 32),
        ([4096] * 32, [4096], 32),
        (every(2, 24, 128), [None, 128], 12),
        (every(6, 48, 1024), [None] + [1024] * 5, 8),
        (every(6, 62, 1024), [None] + [1024] * 6, 10),  # 52 layers in groups of 10
        (every(6, 26, 512), [None] + [512] * 6, 4),
        ([None] * 21 + [64] * 7, [None] * 3 + [64], 7),
    ],
)
def test_groups_of_common_models(
    windows: list[int | None], kinds: list[int | None], rows: int
) -> None:
    layout = kv_layout(windows, 16)
    assert [group.window for group in layout.groups] == kinds
    assert layout.layers_per_block == rows
    assert layout.has_windows == (kinds != [None])


@given(windows=WINDOWS)
def test_every_layer_has_one_row_among_those_of_its_window(windows: list[int | None]) -> None:
    layout = kv_layout(windows, 4)
    assert len(set(layout.rows)) == len(windows)
    for layer, (group, row) in enumerate(layout.rows):
        assert layout.groups[group].window == windows[layer]
        assert layout.groups[group].layers[row] == layer
        assert row < layout.layers_per_block


@given(windows=WINDOWS, num_tokens=st.integers(1, 60), start=st.integers(0, 15))
def test_a_job_has_the_blocks_that_later_tokens_read(
    windows: list[int | None], num_tokens: int, start: int
) -> None:
    layout = kv_layout(windows, 4)
    count = layout.blocks_for(num_tokens)
    tables = [BlockTable(list(range(100 * g, 100 * g + count))) for g in range(len(layout.groups))]
    blocks = layout.job_blocks(tables, num_tokens)
    read = {
        100 * number + position // 4
        for number, group in enumerate(layout.groups)
        for position in range(num_tokens)
        if group.window is None or position > num_tokens - 1 - group.window
    }
    assert read <= set(blocks)
    assert len(blocks) == len(set(blocks)) == layout.held_blocks(num_tokens)
    start = min(start, count)
    index = layout.job_index(start, num_tokens)
    assert blocks[:index] == layout.job_range(tables, 0, start, num_tokens)
    assert blocks[index:] == layout.job_range(tables, start, count, num_tokens)


@given(windows=WINDOWS, num_blocks=st.integers(1, 200), chunk=st.integers(1, 20))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(
    windows: list[int | None], num_blocks: int, chunk: int
) -> None:
    layout = kv_layout(windows, 4)
    longest = layout.longest_sequence(num_blocks, chunk)
    assert longest == 0 or layout.most_blocks(longest, chunk) <= num_blocks
    if None in windows:
        assert layout.most_blocks(longest + 1, chunk) > num_blocks
    if longest:
        assert layout.held_blocks(longest) <= layout.most_blocks(longest, chunk)


@given(windows=WINDOWS)
def test_layer_groups_are_final_after_the_last_layer_that_has_them(
    windows: list[int | None],
) -> None:
    layout = kv_layout(windows, 4)
    ends = layout.last_layers()
    assert len(ends) == len(layout.layer_groups) and ends[-1] == len(windows) - 1
    assert ends == sorted(ends)
    per = layout.layers_per_block // len(ends)
    for number, end in enumerate(ends, start=1):
        assert all(layer <= end for layer, (_, row) in enumerate(layout.rows) if row < number * per)


@pytest.mark.parametrize(
    ("num_layers", "count"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (7, 7), (11, 1), (26, 2), (27, 3), (32, 8)],
)
def test_layer_groups_are_equal_and_as_many_as_may_be(num_layers: int, count: int) -> None:
    layout = kv_layout([None] * num_layers)
    assert layout.layer_groups == range(count)
    assert layout.layer_group_bytes == num_layers * 8 // count


@pytest.mark.parametrize(
    ("count", "ends"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (7, [3, 5, 6, 7]), (8, [4, 6, 7, 8])]
)
def test_each_range_leaves_half_of_what_is_left_and_finally_one_group(
    count: int, ends: list[int]
) -> None:
    starts = [0, *ends[:-1]]
    expected = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    assert kv_layout([None] * count).send_ranges() == expected


def fill(pool: BlockPool, count: int) -> list[BlockTable]:
    tables = [BlockTable(pool.allocate(count)) for _ in pool.layout.groups]
    pool.register(tables, HASHES, 0, count)
    return tables


def give_up(pool: BlockPool, tables: list[BlockTable]) -> None:
    for table in tables:
        pool.release(table.held)


def test_a_prefix_is_found_where_all_that_is_read_is_cached() -> None:
    pool = BlockPool(40, kv_layout([None, 8], 4))
    tables = fill(pool, 6)
    pool.release(tables[1].drop_before(3))
    found = pool.lookup(HASHES[:6])
    assert [table.block_ids for table in found] == [
        tables[0].block_ids,
        [NO_BLOCK] * 4 + tables[1].block_ids[4:],
    ]
    give_up(pool, tables)
    pool.allocate(28 + 1)  # evicts the oldest: the window's first
    assert [len(table) for table in pool.lookup(HASHES[:6])] == [6, 6]
    assert [len(table) for table in pool.lookup(HASHES[:2])] == [2, 2]
    pool.allocate(1)
    assert [len(table) for table in pool.lookup(HASHES[:2])] == [1, 1]
    pool.allocate(1)
    assert [len(table) for table in pool.lookup(HASHES[:2])] == [0, 0]
    assert [len(table) for table in pool.lookup(HASHES[:6])] == [6, 6]


def test_a_hash_is_published_while_all_groups_have_it() -> None:
    known: set[BlockHash] = set()

    class Listener:
        def added(self, hashes: list[BlockHash]) -> None:
            assert known.isdisjoint(hashes)
            known.update(hashes)

        def removed(self, hashes: list[BlockHash]) -> None:
            assert known.issuperset(hashes)
            known.difference_update(hashes)

    pool = BlockPool(9, kv_layout([None, 8, 3], 4), listener=Listener())
    tables = fill(pool, 3)
    assert known == set(HASHES[:3]) == set(pool.cached_hashes())
    pool.release(tables[2].drop_before(2))
    pool.allocate(1)
    assert known == {HASHES[0], HASHES[2]} == set(pool.cached_hashes())
    give_up(pool, tables)
    pool.drop_cache()
    assert known == set()


def test_a_second_copy_in_a_window_is_left_out_and_what_follows_it_is_not() -> None:
    pool = BlockPool(20, kv_layout([4], 4))
    give_up(pool, fill(pool, 2))
    second = [BlockTable(pool.allocate(4))]
    pool.register(second, HASHES, 0, 4)
    assert pool.lookup(HASHES[:4])[0].held == second[0].block_ids[3:]
    pool.check_integrity(dict.fromkeys(second[0].block_ids, 1))
