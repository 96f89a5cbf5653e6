"""The attention grid's arithmetic: what a case reads and computes."""

from __future__ import annotations

import pytest

from pagewire.kernels.bench.attention_grid import SHAPES, kv_bytes, visible_pairs


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("chunk", "context"), [(1, 1), (5, 5), (3, 9), (1, 70)])
def test_visible_pairs(chunk: int, context: int, window: int | None) -> None:
    queries, keys = range(context - chunk, context), range(context)
    seen = [key for query in queries for key in keys if query - (window or context) < key <= query]
    assert visible_pairs(chunk, context, window) == len(seen)


def test_kv_bytes_are_those_of_keys_and_values_in_bfloat16() -> None:
    by_name = {str(shape): kv_bytes(1024, shape) for shape in SHAPES}
    assert by_name["32/8 heads of 128"] == 1024 * 2 * 8 * 128 * 2
    assert by_name["16/8 heads of 256, cap 50"] == 1024 * 2 * 8 * 256 * 2


def test_shapes_cover_one_to_eight_queries_a_kv_head() -> None:
    assert {shape.heads // shape.kv_heads for shape in SHAPES} == {1, 2, 4, 7, 8}
