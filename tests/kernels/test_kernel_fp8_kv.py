"""Attention over a KV cache in FP8, and what is written to it: references and Triton kernels.

Products are in float16 where queries have 16 bits, so the interpreter computes bfloat16, too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagewire.kernels import _decode_splits as splits_module
from pagewire.kernels import _kv_copies, load_ops
from pagewire.kernels._kv_copies import copy_blocks, heads_at_once
from pagewire.kernels.bench.inputs import PagedCase, decode_case
from pagewire.kernels.fp8_numbers import UNSCALED, KvScales

E4M3 = torch.float8_e4m3fn
SCALES = KvScales(keys=0.4, values=3.0)
OPTIONS = {
    "scale-1": {"kv_scales": UNSCALED},
    "scales": {"kv_scales": SCALES},
    "window": {"kv_scales": SCALES, "window": 13},
    "cap": {"kv_scales": SCALES, "soft_cap": 0.7},
    "all": {"kv_scales": SCALES, "window": 21, "soft_cap": 1.5, "has_sinks": True},
}
DECODE_CASES = {
    "block-boundaries": decode_case((1, 15, 16, 17, 0, 100), 4, 2, 16),
    "block-32-group-3": decode_case((5, 123, 31, 32, 33), 6, 2, 32, 32),
    "dim-256": decode_case((63, 129), 2, 1, 256),
    "dim-24": decode_case((40, 0, 17), 4, 2, 24),
}
PREFILL_CASES = {
    "ragged-prefixes": PagedCase((1, 17, 0, 33), (1, 40, 20, 128), 6, 2, 32),
    "wide-chunk-block-32": PagedCase((130,), (300,), 2, 1, 64, 32),
    "dim-24": PagedCase((70, 3), (130, 3), 3, 1, 24),
}
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
EACH_DTYPE = pytest.mark.parametrize(
    "q_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


def _decode(x, ops, **options):
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, x.seq_lens, x.scale)
    return ops.paged_decode(*args, **{**x.options, **options})


def _prefill(x, ops, **options):
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)
    return ops.paged_prefill(*args, **{**x.options, **options})


def _meant(x):
    """Return the same inputs with a cache of the numbers that FP8 stands for, in float32."""
    scales = x.options["kv_scales"]
    options = {name: value for name, value in x.options.items() if name != "kv_scales"}
    caches = (x.k_cache.float() * scales.keys, x.v_cache.float() * scales.values)
    return replace(x, k_cache=caches[0], v_cache=caches[1], options=options)


@EACH_OPTION
def test_reference_is_attention_to_what_numbers_stand_for(options, reference, assert_close):
    x = replace(PREFILL_CASES["ragged-prefixes"], **options).build("cpu", torch.float32)
    assert x.k_cache.dtype == E4M3
    assert_close(_prefill(x, reference), _prefill(_meant(x), reference))
    x = replace(DECODE_CASES["block-boundaries"], **options).build("cpu", torch.float32)
    assert_close(_decode(x, reference), _decode(_meant(x), reference))


@EACH_DTYPE
@EACH_OPTION
@pytest.mark.parametrize("case", DECODE_CASES.values(), ids=DECODE_CASES)
def test_decode_matches_reference(case, options, q_dtype, device, kernels, reference, assert_close):
    x = replace(case, **options).build(device, q_dtype)
    assert_close(_decode(x, kernels), _decode(x, reference))


@EACH_DTYPE
@pytest.mark.parametrize("least_tiles", [1, 1000], ids=["by-length", "even"])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_decode_is_right_for_any_number_of_splits(
    splits, least_tiles, q_dtype, device, kernels, reference, assert_close, monkeypatch
):
    monkeypatch.setattr(splits_module, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(splits_module, "_LEAST_TILES", least_tiles)
    case = replace(decode_case((1, 0, 129, 300), 4, 1, 64), kv_scales=SCALES, has_sinks=True)
    x = case.build(device, q_dtype)
    assert_close(_decode(x, kernels), _decode(x, reference))


@EACH_DTYPE
@EACH_OPTION
@pytest.mark.parametrize("case", PREFILL_CASES.values(), ids=PREFILL_CASES)
def test_prefill_matches_reference(
    case, options, q_dtype, device, kernels, reference, assert_close
):
    x = replace(case, **options).build(device, q_dtype)
    assert_close(_prefill(x, kernels), _prefill(x, reference))


@EACH_DTYPE
@EACH_OPTION
def test_invariant_attention_matches_reference(options, q_dtype, device, reference, assert_close):
    invariant = load_ops("triton", device, batch_invariant=True)
    x = replace(PREFILL_CASES["ragged-prefixes"], **options).build(device, q_dtype)
    assert_close(_prefill(x, invariant), _prefill(x, reference))
    x = replace(DECODE_CASES["block-boundaries"], **options).build(device, q_dtype)
    assert_close(_decode(x, invariant), _decode(x, reference))


@pytest.mark.parametrize("power", [-100, -20, 20, 100])
def test_queries_beyond_the_range_of_float16(power, device, kernels, reference, assert_close):
    """One query is larger than the others by far, so each has a factor of its own."""
    x = replace(decode_case((40, 70), 4, 2, 64), kv_scales=SCALES).build(device, torch.bfloat16)
    expected = _decode(x, reference)
    for row, each in enumerate((power, power + 25)):
        one = replace(x, q=x.q * 2.0**each, scale=x.scale / 2.0**each)
        assert_close(_decode(one, kernels)[row], expected[row])
        assert_close(_prefill(one, kernels)[row], expected[row])


def test_queries_of_zeros_see_all_alike(device, kernels, reference, assert_close):
    x = replace(decode_case((40,), 2, 1, 16), kv_scales=SCALES).build(device, torch.bfloat16)
    x.q.zero_()
    assert_close(_decode(x, kernels), _decode(x, reference))


@pytest.mark.gpu
@EACH_DTYPE
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_large_shapes(dim, q_dtype, kernels, reference, assert_close):
    lengths = (1, 127, 128, 129, 513, 4000, 9000)
    options = {"kv_scales": SCALES, "dim": dim}
    x = replace(decode_case(lengths, 16, 4), **options).build("cuda", q_dtype)
    assert_close(_decode(x, kernels), _decode(x, reference))
    case = PagedCase((1, 700, 129, 64), (900, 700, 9000, 64), 16, 4)
    chunks = tuple(zip(case.query_lens, case.seq_lens, strict=True))
    for more in ({}, {"window": 600}, {"soft_cap": 2.0, "has_sinks": True}):
        x = replace(case, **options, **more).build("cuda", q_dtype)
        expected = _prefill(x, reference)
        assert_close(_prefill(x, kernels), expected)
        assert_close(_prefill(x, kernels, chunks=chunks), expected)


def _write(ops, device, dtype, rotated=32, normed=False):
    """Write keys and values of 5 tokens, some far out of range; return the caches as bytes."""
    generator = torch.Generator().manual_seed(0)
    shape = (5, 6, 32)  # 2 heads of queries, keys and values
    fused = (
        torch.randn(shape, generator=generator)
        * torch.tensor([0.01, 1, 30, 1e4, 1.0])[:, None, None]
    )
    fused[4, :, 3] = torch.nan
    q, k, v = fused.to(device, dtype).split(2, dim=1)
    cos_sin = torch.randn((64, rotated), generator=generator).to(device) if rotated else None
    norm = torch.rand(32, generator=generator).to(device, dtype) + 0.5
    cache = torch.zeros((3, 2, 2, 16, 32), dtype=E4M3, device=device)
    slots = torch.tensor([3, 17, -1, 40, 47], device=device)
    positions = torch.tensor([0, 5, 9, 63, 2], device=device)
    norms = (norm, norm, 1e-5) if normed else ()
    caches = (cache[:, 0], cache[:, 1])
    ops.rotary_and_cache(positions, q, k, v, cos_sin, *caches, slots, *norms, kv_scales=SCALES)
    in_bytes = cache.cpu().view(torch.uint8)
    # NaN has either sign: a CPU's NaN in bfloat16 is a negative one.
    return torch.where(in_bytes & 0x7F == 0x7F, 0x7F, in_bytes)


def _steps(cache):
    """Return the numbers of a cache as integers of which neighbours differ by one."""
    magnitudes = (cache & 0x7F).int()
    return torch.where(cache >= 0x80, -magnitudes, magnitudes)


WRITES = {"rotated": (32, False), "a-part-normed": (20, True), "not-rotated": (0, False)}


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("rotated", "normed"), WRITES.values(), ids=WRITES)
def test_what_is_written_is_limited_and_rounded(
    rotated, normed, q_dtype, device, kernels, reference
):
    """If a rotation is rounded otherwise, some numbers are neighbours of the right ones."""
    expected = _write(reference, "cpu", q_dtype, rotated, normed)
    written = _write(kernels, device, q_dtype, rotated, normed)
    apart = (_steps(written) - _steps(expected)).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.01
    numbers = written.view(E4M3).float()
    assert numbers[2, 1, :, 8].abs().max() == 448
    assert numbers[2, :, :, 15, 3].isnan().all()
    assert not numbers[0, :, :, :3].any()  # KV slots that are not written


@EACH_DTYPE
def test_what_is_not_rotated_has_the_bits_of_torch(q_dtype, device, kernels, reference):
    """Whoever writes a block, a token's bytes are the same."""
    written = _write(kernels, device, q_dtype, rotated=0)
    assert torch.equal(written, _write(reference, "cpu", q_dtype, rotated=0))


def test_reference_writes_what_torch_rounds(reference):
    values = torch.tensor([0.0, 1.0, 1.07, 447.0, 500.0, -1e9, 1e-9, torch.nan])
    cache = torch.zeros((1, 1, 2, 8), dtype=E4M3)
    x = values[None, None] * 2
    slots = torch.zeros(1, dtype=torch.int64)
    scales = KvScales(2.0, 4.0)
    args = (slots, x.clone(), x, x, None, cache[..., :1, :], cache[..., 1:, :], slots)
    reference.rotary_and_cache(*args, kv_scales=scales)
    keys, of_values = cache[0, 0].float()
    expected = torch.tensor([0.0, 1.0, 1.125, 448.0, 448.0, -448.0, 0.0, torch.nan])
    assert torch.equal(keys.nan_to_num(7), expected.nan_to_num(7))
    assert of_values[4] == 256 and of_values[3] == 224


COPIED = {
    "two-sequences": PagedCase((17, 33), (40, 128), 6, 2, 32),
    "none-and-one": PagedCase((0, 5), (20, 5), 4, 4, 64),
    "block-32": PagedCase((130,), (300,), 4, 2, 64, 32),
}


@pytest.mark.parametrize("heads", [1, 8], ids=["a-head-at-a-time", "all-heads"])
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("case", COPIED.values(), ids=COPIED)
def test_copies_are_what_numbers_stand_for(
    case, window, heads, device, reference, assert_close, monkeypatch
):
    """Blocks that no query sees are left out."""
    x = replace(case, kv_scales=SCALES, window=window).build(device, torch.float16)
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    chunks = list(zip(x.cu_query_lens.diff().tolist(), x.seq_lens.tolist(), strict=True))
    head_bytes = sum(-(-context // x.k_cache.shape[2]) for _, context in chunks) * 4
    head_bytes *= x.k_cache[0, 0].numel()
    monkeypatch.setattr(_kv_copies, "WORKSPACE_BYTES", heads * head_bytes + 100)
    actual, at_once = torch.empty_like(x.q), min(heads, case.kv_heads)
    assert heads_at_once(x.k_cache, chunks, x.q.dtype) == at_once
    caches = (x.k_cache, x.v_cache, x.block_tables, *lengths[:2])
    for part in copy_blocks(*caches, chunks, x.q.dtype, SCALES.values, window):
        assert part.keys.shape[1] == at_once
        own = part.queries(x.q.shape[1])
        part.tables.clamp_(0, len(part.keys) - 1)  # torch reads what no query sees
        parts = (x.q[:, own], part.keys.nan_to_num(), part.values.nan_to_num(), part.tables)
        factor = x.scale * SCALES.keys
        actual[:, own] = reference.paged_prefill(*parts, *lengths, factor, window=window)
    assert_close(actual, _prefill(x, reference))
