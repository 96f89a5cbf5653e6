"""Paged attention in Triton against the torch references."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import _decode_splits as splits_module
from pagewire.kernels import paged_decode as decode_module
from pagewire.kernels.bench.inputs import PagedCase, decode_case
from pagewire.kernels.errors import KernelError, UnsupportedShapeError

DECODE_CASES = {
    "block-boundaries": decode_case((1, 15, 16, 17, 0, 100), 4, 2, 16),
    "one-row-group-3": decode_case((33,), 3, 1, 64),
    "block-32-awkward-lengths": decode_case((5, 123, 31, 32, 33), 12, 4, 32, 32),
    "group-7-dim-128": decode_case((300, 129), 7, 1, 128),
    "multi-head-no-group": decode_case((47, 48, 49), 5, 5, 32),
    "dim-256-block-64": decode_case((63, 65), 2, 1, 256, 64),
    "group-wider-than-16": decode_case((40,), 20, 1, 16),
    "dim-24": decode_case((40, 0, 17), 4, 2, 24),
    "dim-96": decode_case((300, 5), 3, 1, 96, 32),
    "all-padding": decode_case((0, 0), 4, 2, 16),
}
LARGE_DECODE_CASES = {
    "128x1k": decode_case((1024,) * 128),
    "1x16k": decode_case((16384,)),
    "ragged-32": decode_case(tuple(range(1, 8192, 257))),
    "ragged-with-padding-block-128": decode_case((0, 1, 127, 128, 129, 4000), 32, 8, 128, 128),
    "dim-64-block-32": decode_case((1000, 33, 2047), 24, 8, 64, 32),
    "dim-256": decode_case((1000, 33, 2047), 16, 4, 256),
    "group-8": decode_case((5000, 17), 64, 8),
    "dim-96": decode_case((1000, 33, 2047), 32, 32, 96),
    "174-ragged": decode_case(tuple(range(0, 4000, 23))),
    "one-long-of-100": decode_case((100,) * 99 + (12000,)),
    "long-first-of-600": decode_case((9000, *range(599))),
    "300-short-dim-256-group-10": decode_case(tuple(range(300)), 40, 4, 256),
}
PREFILL_CASES = {
    "one-token": PagedCase((1,), (1,), 4, 2, 16),
    "no-prefix": PagedCase((5,), (5,), 4, 2, 32),
    "ragged-prefixes": PagedCase((1, 17, 16, 33), (1, 17, 40, 128), 6, 2, 32),
    "an-empty-chunk": PagedCase((3, 0, 20), (50, 0, 20), 3, 3, 16),
    "block-32-awkward": PagedCase((123,), (123,), 3, 1, 64, 32),
    "chunk-at-tile-edges": PagedCase((64, 65), (128, 129), 2, 1, 16),
    "wide-chunk": PagedCase((130,), (140,), 2, 1, 128),
    "dim-256": PagedCase((9,), (20,), 2, 1, 256),
    "dim-24": PagedCase((70, 3), (130, 3), 3, 1, 24),
    "dim-96": PagedCase((33,), (150,), 2, 1, 96, 32),
}
LARGE_PREFILL_CASES = {
    "8k": PagedCase((8192,), (8192,)),
    "512-on-8k": PagedCase((512,), (8704,)),
    "ragged-chunks": PagedCase((1, 700, 129, 64, 512, 17), (900, 700, 4129, 64, 513, 2017)),
    "dim-64-block-32": PagedCase((300, 1000), (1300, 1000), 24, 8, 64, 32),
    "dim-96": PagedCase((300, 1000), (1300, 1000), 32, 32, 96),
    "dim-256-block-128": PagedCase((300, 77), (1300, 77), 16, 4, 256, 128),
}


def _check_decode(case, device, dtype, kernels, reference, assert_close):
    x = case.build(device, dtype)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, x.seq_lens, x.scale)
    assert_close(kernels.paged_decode(*args), reference.paged_decode(*args))


def _check_prefill(case, device, dtype, kernels, reference, assert_close):
    x = case.build(device, dtype)
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)
    assert_close(kernels.paged_prefill(*args), reference.paged_prefill(*args))


@pytest.mark.parametrize("case", DECODE_CASES.values(), ids=DECODE_CASES)
def test_decode_matches_reference(case, device, dtype, kernels, reference, assert_close):
    _check_decode(case, device, dtype, kernels, reference, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE_DECODE_CASES.values(), ids=LARGE_DECODE_CASES)
def test_large_decode_matches_reference(case, dtype, kernels, reference, assert_close):
    _check_decode(case, "cuda", dtype, kernels, reference, assert_close)


@pytest.mark.parametrize("least_tiles", [1, 1000], ids=["by-length", "even"])
@pytest.mark.parametrize("splits", [1, 2, 7, 30])
def test_decode_is_right_for_any_number_of_splits(
    splits, least_tiles, device, kernels, reference, assert_close, monkeypatch
):
    monkeypatch.setattr(splits_module, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(splits_module, "_LEAST_TILES", least_tiles)
    for lengths in ((1, 0, 129, 500), (3000,) + (20,) * 40, (20,) * 40 + (3000, 0)):
        case = decode_case(lengths, 4, 1, 64)
        _check_decode(case, device, torch.float32, kernels, reference, assert_close)


@pytest.mark.parametrize("least_tiles", [1, 1000], ids=["by-length", "even"])
@pytest.mark.parametrize("splits", [1, 7])
def test_decode_leaves_rows_without_a_sequence(
    splits, least_tiles, device, kernels, reference, monkeypatch
):
    monkeypatch.setattr(splits_module, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(splits_module, "_LEAST_TILES", least_tiles)
    x = decode_case((20, 300, 40), 4, 2, 32).build(device, torch.float32)
    lengths = x.seq_lens.clone()
    lengths[1] = -1
    for ops in (kernels, reference):
        caches = (x.k_cache, x.v_cache, x.block_tables)
        whole = ops.paged_decode(x.q, *caches, x.seq_lens, x.scale)
        out = ops.paged_decode(x.q, *caches, lengths, x.scale, out=torch.full_like(x.q, 5.0))
        assert torch.equal(out[::2], whole[::2])
        assert (out[1] == 5.0).all()


@pytest.mark.parametrize("case", PREFILL_CASES.values(), ids=PREFILL_CASES)
def test_prefill_matches_reference(case, device, dtype, kernels, reference, assert_close):
    _check_prefill(case, device, dtype, kernels, reference, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE_PREFILL_CASES.values(), ids=LARGE_PREFILL_CASES)
def test_large_prefill_matches_reference(case, dtype, kernels, reference, assert_close):
    _check_prefill(case, "cuda", dtype, kernels, reference, assert_close)


def test_attention_writes_into_a_strided_out(device, kernels, reference, assert_close):
    x = PagedCase((3, 2), (20, 2), 4, 2, 16).build(device, torch.float32)
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)
    wide = torch.zeros(5, 6, 16, device=device)
    out = wide[:, 1:5]
    assert kernels.paged_prefill(*args, out=out) is out
    assert_close(out, reference.paged_prefill(*args))
    assert not wide[:, 0].any() and not wide[:, 5].any()

    x = decode_case((20, 2), 4, 2, 16).build(device, torch.float32)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, x.seq_lens, x.scale)
    wide = torch.zeros(2, 6, 16, device=device)
    out = wide[:, 1:5]
    assert kernels.paged_decode(*args, out=out) is out
    assert_close(out, reference.paged_decode(*args))
    assert not wide[:, 0].any() and not wide[:, 5].any()


def test_chunks_may_stand_between_other_rows(device, dtype, kernels, reference):
    x = PagedCase((3, 17), (20, 40), 4, 2, 64).build(device, dtype)
    starts = x.cu_query_lens + 2
    q = torch.cat([x.q[:2], x.q, x.q[:5]])
    for ops in (kernels, reference):
        caches = (x.k_cache, x.v_cache, x.block_tables)
        whole = ops.paged_prefill(x.q, *caches, x.cu_query_lens, x.seq_lens, 17, x.scale)
        out = torch.full_like(q, 5.0)
        ops.paged_prefill(q, *caches, starts, x.seq_lens, 17, x.scale, out=out)
        assert torch.equal(out[2:22], whole)
        assert (out[:2] == 5.0).all() and (out[22:] == 5.0).all()


def test_prefill_of_one_token_equals_decode(device, kernels, assert_close):
    x = decode_case((70, 16), 4, 2, 32).build(device, torch.float32)
    decoded = kernels.paged_decode(x.q, x.k_cache, x.v_cache, x.block_tables, x.seq_lens, x.scale)
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    prefilled = kernels.paged_prefill(x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)
    assert_close(decoded, prefilled)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 44), (4, 2, 8), (4, 2, 512), (4, 3, 16)]
)
def test_unsupported_shapes_are_refused(heads, kv_heads, dim, kernels):
    x = decode_case((4,), heads, kv_heads, dim).build("cpu", torch.float32)
    with pytest.raises(UnsupportedShapeError, match=r"head dimension|query heads"):
        kernels.paged_decode(x.q, x.k_cache, x.v_cache, x.block_tables, x.seq_lens, x.scale)
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    with pytest.raises(KernelError):
        kernels.paged_prefill(x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)


@pytest.mark.parametrize(
    ("programs", "tiles", "expected"),
    [
        pytest.param(8, 4096, range(16, 34), id="one-sequence-fills-the-device"),
        pytest.param(1024, 4096, range(1, 2), id="full-batch-is-not-split"),
        pytest.param(8, 1, range(1, 2), id="nothing-to-split"),
        pytest.param(384, 4096, range(1, 2), id="nearly-all-that-run-at-once"),
        pytest.param(512, 4096, range(2, 3), id="a-bit-over-one-wave"),
        pytest.param(2, 4096, range(100, 129), id="few-programs-expect-long-contexts"),
    ],
)
def test_choice_of_splits(programs, tiles, expected):
    assert splits_module.choose_splits(programs, tiles, 132) in expected


@pytest.mark.parametrize("width", [1, 4, 8, 140])
def test_equal_contexts_have_the_usual_splits_when_they_are_divided_by_length(width):
    for rows in range(2, 600):
        division = splits_module.divide(rows, width, 256, 132)
        for tiles in (1, 7, 256):
            extra = tiles * division.further // (rows * tiles)
            assert extra == division.usual - 1
        assert 0 <= division.further < division.usual * rows
        assert 1 <= division.most <= 1 + division.further


@pytest.mark.parametrize(
    ("programs", "group_pad", "itemsizes", "expected"),
    [
        pytest.param(1024, 16, (2, 2), (64, 4, 2), id="128-sequences-with-8-heads"),
        pytest.param(800, 16, (2, 2), (64, 5, 4), id="too-few-to-fill-all-sms-twice"),
        pytest.param(4096, 32, (2, 2), (64, 5, 4), id="wide-groups"),
        pytest.param(4096, 16, (4, 4), (32, 5, 4), id="float32"),
        pytest.param(1024, 16, (2, 1), (64, 5, 2), id="fp8"),
        pytest.param(800, 16, (2, 1), (128, 5, 4), id="fp8-too-few"),
        pytest.param(800, 32, (2, 1), (64, 5, 4), id="fp8-wide-groups"),
        pytest.param(800, 16, (4, 1), (32, 5, 4), id="fp8-float32"),
    ],
)
def test_choice_of_tilings(programs, group_pad, itemsizes, expected):
    itemsize, cache_itemsize = itemsizes
    chosen = decode_module.choose_tiling(programs, group_pad, 128, itemsize, cache_itemsize, 132)
    assert chosen == expected
    if chosen.warps == 2:
        assert splits_module.choose_splits(programs, 4096, 132) == 1
