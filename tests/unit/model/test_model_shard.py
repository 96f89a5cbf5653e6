"""Which part of a dimension a rank holds."""

from __future__ import annotations

import pytest

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.shard import Cut, Shard


def ranges(size: int, count: int, unit: int = 1) -> list[tuple[int, int]]:
    cuts = [Shard(rank, count).cut(size, "it", unit) for rank in range(count)]
    assert all(cut.size == size and cut.count == b - a for cut in cuts for a, b in cut.ranges)
    return [each for cut in cuts for each in cut.ranges]


def test_parts_are_nearly_equal_and_in_order() -> None:
    assert ranges(12, 1) == [(0, 12)]
    assert ranges(12, 4) == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert ranges(11, 4) == [(0, 2), (2, 5), (5, 8), (8, 11)]
    assert ranges(131, 4) == [(0, 32), (32, 64), (64, 96), (96, 131)]  # multiples of 16
    assert ranges(768, 4, 128) == [(0, 128), (128, 384), (384, 512), (512, 768)]
    assert ranges(300, 2, 128) == [(0, 128), (128, 300)]  # the last unit has less


def test_a_rank_without_a_part_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"3 ranks cannot share it \(200\).* at most 2 ranks"):
        Shard(0, 3).cut(200, "it", 128)


def test_several_ranks_have_the_kv_head_that_their_query_heads_read() -> None:
    pairs = [Shard(rank, 4).heads(28, 2) for rank in range(4)]
    assert [heads.ranges for heads, _ in pairs] == [((0, 7),), ((7, 14),), ((14, 21),), ((21, 28),)]
    assert [kv.ranges for _, kv in pairs] == [((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),)]
    assert Shard(1, 2).heads(28, 4)[1].ranges == ((2, 4),)


def test_fused_dimensions_have_a_range_of_each() -> None:
    q, kv = Shard(1, 2).cut(8, "q"), Shard(1, 2).cut(4, "kv")
    assert Cut.joined((q, kv, kv)) == Cut(16, ((4, 8), (10, 12), (14, 16)))
    whole = Shard().cut(8, "q")
    assert Cut.joined((whole, whole)) == Cut(16, ((0, 16),))
    assert Cut.joined((whole, whole)).is_whole
    first, second = Cut(4, ((2, 4),)), Cut(4, ((0, 1), (3, 4)))
    assert Cut.joined((first, second)) == Cut(8, ((2, 5), (7, 8)))


def test_blocks_are_cut_between_them() -> None:
    assert Cut(300, ((128, 300),)).blocks(128, "it") == Cut(3, ((1, 3),))
    for inside in ((64, 128), (0, 200)):
        with pytest.raises(ModelLoadError, match="it: a rank's part would begin or end within 128"):
            Cut(300, (inside,)).blocks(128, "it")
