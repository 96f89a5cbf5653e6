"""Attention with windows, capped scores and sinks: references and Triton kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagewire.kernels import _decode_splits as splits_module
from pagewire.kernels.bench.inputs import PagedCase, decode_case

OPTIONS = {
    "window-of-one": {"window": 1},
    "window-of-13": {"window": 13},
    "window-of-two-blocks": {"window": 32},
    "window-longer-than-all": {"window": 1000},
    "cap": {"soft_cap": 0.7},
    "sinks": {"has_sinks": True},
    "all-three": {"window": 21, "soft_cap": 1.5, "has_sinks": True},
}
DECODE_CASES = {
    "block-boundaries": decode_case((1, 15, 16, 17, 0, 100), 4, 2, 16),
    "block-32-group-3": decode_case((5, 123, 31, 32, 33), 6, 2, 32, 32),
    "dim-256": decode_case((63, 129), 2, 1, 256),
    "dim-24": decode_case((40, 0, 17), 4, 2, 24),
}
PREFILL_CASES = {
    "one-token": PagedCase((1,), (1,), 4, 2, 16),
    "ragged-prefixes": PagedCase((1, 17, 0, 33), (1, 40, 20, 128), 6, 2, 32),
    "chunk-at-tile-edges": PagedCase((64, 65), (128, 129), 2, 1, 16),
    "wide-chunk-block-32": PagedCase((130,), (300,), 2, 1, 64, 32),
    "dim-256": PagedCase((9, 20), (60, 20), 2, 1, 256),
    "dim-24": PagedCase((70, 3), (130, 3), 3, 1, 24),
}
# Heads, windows and caps of published models.
LARGE = {
    "gemma-2-9b": {"heads": 16, "kv_heads": 8, "dim": 256, "window": 1000, "soft_cap": 50.0},
    "gemma-3-1b": {"heads": 4, "kv_heads": 1, "dim": 256, "window": 512},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "dim": 64, "window": 128, "has_sinks": True},
    "mistral-7b": {"heads": 32, "kv_heads": 8, "dim": 128, "window": 4096},
}


def _decode(x, ops):
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, x.seq_lens, x.scale)
    return ops.paged_decode(*args, **x.options)


def _prefill(x, ops):
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)
    return ops.paged_prefill(*args, **x.options)


def _one_query(x, case, row, sequence, position):
    """One query `[H, D]` over what it sees, token by token and head by head, in float64."""
    table = x.block_tables[sequence]
    first = 0 if case.window is None else max(0, position + 1 - case.window)
    seen = range(first, position + 1)
    at = [(int(table[t // case.block_size]), t % case.block_size) for t in seen]
    assert all(block > 0 for block, _ in at)  # neither a spare block nor a hidden one
    out = []
    for head, query in enumerate(x.q[row].double()):
        kv_head = head // (case.heads // case.kv_heads)
        keys, values = (
            torch.stack([cache[block, kv_head, offset] for block, offset in at]).double()
            for cache in (x.k_cache, x.v_cache)
        )
        scores = keys @ query * x.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        weights = scores.exp()
        total = weights.sum()
        if case.has_sinks:
            total = total + x.options["sinks"][head].double().exp()
        out.append(weights @ values / total)
    return torch.stack(out)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_reference_prefill_is_the_definition(options, reference, assert_close):
    case = replace(PagedCase((1, 6, 37), (33, 6, 60), 6, 2, 16), **options)
    x = case.build("cpu", torch.float32)
    out = _prefill(x, reference)
    row = 0
    for sequence, (query_len, seq_len) in enumerate(
        zip(case.query_lens, case.seq_lens, strict=True)
    ):
        for position in range(seq_len - query_len, seq_len):
            assert_close(out[row], _one_query(x, case, row, sequence, position).float())
            row += 1


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_reference_decode_is_the_definition(options, reference, assert_close):
    case = replace(decode_case((33, 0, 16, 1), 6, 2, 16), **options)
    x = case.build("cpu", torch.float32)
    out = _decode(x, reference)
    assert not out[1].any()
    for row in (0, 2, 3):
        expected = _one_query(x, case, row, row, case.seq_lens[row] - 1)
        assert_close(out[row], expected.float())


def test_reference_tiles_of_queries_have_windows_of_their_own(reference, assert_close):
    x = replace(PagedCase((700,), (1300,), 2, 1, 16), window=40).build("cpu", torch.float32)
    whole = _prefill(x, reference)
    end = replace(PagedCase((100,), (1300,), 2, 1, 16), window=40).build("cpu", torch.float32)
    end.q.copy_(x.q[600:])
    lengths = (end.cu_query_lens, end.seq_lens, end.max_query_len)
    args = (end.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)
    assert_close(reference.paged_prefill(*args, window=40), whole[600:])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", DECODE_CASES.values(), ids=DECODE_CASES)
def test_decode_matches_reference(case, options, device, kernels, reference, assert_close):
    x = replace(case, **options).build(device, torch.float32)
    assert_close(_decode(x, kernels), _decode(x, reference))


@pytest.mark.parametrize("least_tiles", [1, 1000], ids=["by-length", "even"])
@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decode_is_right_for_any_number_of_splits(
    splits, options, least_tiles, device, kernels, reference, assert_close, monkeypatch
):
    monkeypatch.setattr(splits_module, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(splits_module, "_LEAST_TILES", least_tiles)
    case = replace(decode_case((1, 0, 129, 300), 4, 1, 64), **options)
    x = case.build(device, torch.float32)
    assert_close(_decode(x, kernels), _decode(x, reference))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", PREFILL_CASES.values(), ids=PREFILL_CASES)
def test_prefill_matches_reference(case, options, device, kernels, reference, assert_close):
    x = replace(case, **options).build(device, torch.float32)
    assert_close(_prefill(x, kernels), _prefill(x, reference))


def test_half_precision(device, dtype, kernels, reference, assert_close):
    options = OPTIONS["all-three"]
    x = replace(decode_case((5, 70), 4, 2, 64), **options).build(device, dtype)
    assert_close(_decode(x, kernels), _decode(x, reference))
    x = replace(PagedCase((5, 40), (5, 90), 4, 2, 64), **options).build(device, dtype)
    assert_close(_prefill(x, kernels), _prefill(x, reference))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_large_shapes(shape, dtype, kernels, reference, assert_close):
    lengths = (1, 127, 128, 129, 513, 4000, 9000)
    x = replace(decode_case(lengths), **shape).build("cuda", dtype)
    assert_close(_decode(x, kernels), _decode(x, reference))
    x = replace(PagedCase((1, 700, 129, 64), (900, 700, 9000, 64)), **shape).build("cuda", dtype)
    assert_close(_prefill(x, kernels), _prefill(x, reference))


def test_scores_far_apart(device, kernels, reference, assert_close):
    """Capped scores reach their cap; a sink far above all scores leaves next to nothing."""
    x = replace(decode_case((40,), 2, 1, 16), soft_cap=3.0, has_sinks=True).build(
        device, torch.float32
    )
    x.q.mul_(1e4)
    x.options["sinks"].copy_(torch.tensor([500.0, -500.0]))
    out = _decode(x, kernels)
    assert_close(out, _decode(x, reference))
    assert out[0, 0].abs().max() < 1e-30 < out[0, 1].abs().max()


def test_a_long_context_is_cut_like_its_window(device, kernels, monkeypatch):
    tiles = []

    def choose(_programs, count, *_):
        tiles.append(count)
        return 1

    monkeypatch.setattr(splits_module, "choose_splits", choose)
    case = decode_case((3000,), 2, 1, 64)
    for window in (None, 128, 129):
        _decode(replace(case, window=window).build(device, torch.float32), kernels)
    assert tiles == [-(-3000 // 64) + 1, 2, 3]
