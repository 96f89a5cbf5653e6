"""The Hopper kernel of paged prefill against the torch reference; when the launcher takes it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from pagewire.kernels import paged_prefill as launcher
from pagewire.kernels import paged_prefill_hopper
from pagewire.kernels.bench.inputs import PagedCase
from pagewire.kernels.prefill_tiles import (
    LONGEST_UNSPLIT,
    TILES,
    LaunchRows,
    choose_tiles_and_splits,
)

# Short chunks on contexts of any length, of which some are split, and not all rows of a program see
# all of the last split.
SPLIT = ((9, 70, 9, 3), (5009, 1093, 8, 700))
CHUNKS = (1, 17, 127, 128, 129, 512)
PREFIXES = (0, 1, 16, 8191)
# Several sequences: chunks of each length, one of them empty, on prefixes of any length.
PACKED = ((1, 129, 0, 17, 300, 64), (1, 8320, 5, 33, 300, 513))


@pytest.fixture
def hopper_prefill():
    """The Hopper kernel itself, which the launcher would quietly replace where it cannot load."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the device is not a Hopper GPU")

    def call(q, *args, out=None, **options):
        out = torch.empty_like(q) if out is None else out
        paged_prefill_hopper.hopper_prefill(q, *args, out=out, **options)
        return out

    return call


# Windows that end in a page, at its edge, in another tile; caps that most scores feel.
OPTIONS = {
    "plain": {},
    "window-of-one": {"window": 1},
    "window-of-13": {"window": 13},
    "window-of-a-tile": {"window": 128},
    "window-of-300": {"window": 300},
    "window-of-1500": {"window": 1500},
    "window-longer-than-all": {"window": 10000},
    "cap": {"soft_cap": 2.0},
    "sinks": {"has_sinks": True},
    "all-three": {"window": 77, "soft_cap": 2.0, "has_sinks": True},
}


def _args(x):
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    return (x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)


def _check(case, dtype, hopper_prefill, reference, assert_close):
    x = case.build("cuda", dtype)
    assert_close(
        hopper_prefill(*_args(x), **x.options), reference.paged_prefill(*_args(x), **x.options)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunk_on_a_prefix(chunk, prefix, hopper_prefill, reference, assert_close):
    args = _args(PagedCase((chunk,), (prefix + chunk,)).build("cuda", torch.bfloat16))
    assert_close(hopper_prefill(*args), reference.paged_prefill(*args))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size"),
    [
        pytest.param(4, 4, 16, id="group-1-block-16"),
        pytest.param(16, 4, 16, id="group-4-block-16"),
        pytest.param(16, 2, 16, id="group-8-block-16"),
        pytest.param(14, 2, 32, id="group-7-block-32"),
        pytest.param(16, 2, 32, id="group-8-block-32"),
        pytest.param(4, 4, 64, id="group-1-block-64"),
        pytest.param(16, 4, 128, id="group-4-block-128"),
        pytest.param(8, 1, 256, id="group-8-block-256"),
    ],
)
def test_packed_sequences(heads, kv_heads, block_size, hopper_prefill, reference, assert_close):
    case = PagedCase(*PACKED, heads=heads, kv_heads=kv_heads, block_size=block_size)
    args = _args(case.build("cuda", torch.float16))
    assert_close(hopper_prefill(*args), reference.paged_prefill(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("dim", [64, 256])
def test_head_dimensions(dim, block_size, dtype, hopper_prefill, reference, assert_close):
    case = PagedCase(*PACKED, heads=16, kv_heads=4, dim=dim, block_size=block_size)
    _check(case, dtype, hopper_prefill, reference, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("dim", "tiles", "heads", "block_size"),
    [
        pytest.param(dim, tiles, *shape, id=f"dim-{dim}-groups-{tiles.warp_groups}-{shape}")
        for dim, shape in ((64, (14, 16)), (128, (8, 16)), (128, (2, 128)), (256, (6, 32)))
        for tiles in TILES[dim]
    ],
)
def test_windows_caps_and_sinks(
    dim, tiles, heads, block_size, options, hopper_prefill, reference, assert_close, monkeypatch
):
    """With all tiles of a head dimension, whichever the launcher would choose."""
    monkeypatch.setitem(TILES, dim, (tiles,))
    case = PagedCase(*PACKED, heads=heads, kv_heads=2, dim=dim, block_size=block_size)
    _check(replace(case, **options), torch.bfloat16, hopper_prefill, reference, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [2, 11, 100])
@pytest.mark.parametrize("name", ["plain", "window-of-300", "window-of-1500", "sinks", "all-three"])
@pytest.mark.parametrize(
    ("dim", "tiles"),
    [
        pytest.param(dim, tiles, id=f"dim-{dim}-groups-{tiles.warp_groups}")
        for dim in (64, 128, 256)
        for tiles in TILES[dim]
    ],
)
def test_splits_of_contexts(
    dim, tiles, name, splits, hopper_prefill, reference, assert_close, monkeypatch
):
    monkeypatch.setattr(paged_prefill_hopper, "choose_tiles_and_splits", lambda *_: (tiles, splits))
    case = replace(PagedCase(*SPLIT, heads=14, kv_heads=2, dim=dim), **OPTIONS[name])
    _check(case, torch.bfloat16, hopper_prefill, reference, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_chunks_at_every_offset_of_a_window(dim, hopper_prefill, reference, assert_close):
    """Where a window starts in a page and in a tile depends on the prefix."""
    prefixes = [*range(30), *range(100, 160), 255, 256, 257]
    chunks = tuple(1 + 7 * (index % 5) for index in range(len(prefixes)))
    lengths = tuple(map(sum, zip(prefixes, chunks, strict=True)))
    case = PagedCase(chunks, lengths, heads=4, kv_heads=2, dim=dim, window=50)
    _check(case, torch.bfloat16, hopper_prefill, reference, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "tiles"),
    [
        pytest.param(dim, tiles, id=f"dim-{dim}-groups-{tiles.warp_groups}")
        for dim in (64, 128, 256)
        for tiles in TILES[dim]
        if tiles.warp_groups > 1
    ],
)
def test_a_window_and_the_end_in_one_page(
    dim, tiles, hopper_prefill, reference, assert_close, monkeypatch
):
    """Each warp group clears both ends of the page, in any order with the others."""
    monkeypatch.setitem(TILES, dim, (tiles,))
    prefixes = [*range(10, 54)] * 8
    lengths = tuple(prefix + 9 for prefix in prefixes)
    case = PagedCase((9,) * len(prefixes), lengths, 16, 2, dim, block_size=64, window=6)
    x = case.build("cuda", torch.bfloat16)
    expected = reference.paged_prefill(*_args(x), **x.options)
    for _ in range(20):
        assert_close(hopper_prefill(*_args(x), **x.options), expected)


@pytest.mark.gpu
def test_large_scores_and_strided_out(hopper_prefill, reference, assert_close):
    x = PagedCase((200, 150), (1000, 150), heads=8, kv_heads=2).build("cuda", torch.bfloat16)
    x.q.mul_(30)  # the highest score moves by hundreds from tile to tile
    wide = torch.zeros(350, 10, 128, device="cuda", dtype=torch.bfloat16)
    hopper_prefill(*_args(x), out=wide[:, 1:9])
    assert_close(wide[:, 1:9], reference.paged_prefill(*_args(x)))
    assert not wide[:, 0].any() and not wide[:, 9].any()


@pytest.mark.gpu
def test_large_scores_below_the_soft_cap(hopper_prefill, reference, assert_close):
    """Where the error of the approximate tanh moves weights by about a percent."""
    case = PagedCase((64, 300), (500, 300), heads=8, kv_heads=2, soft_cap=50.0)
    x = case.build("cuda", torch.bfloat16)
    x.q.mul_(5)
    assert_close(
        hopper_prefill(*_args(x), **x.options), reference.paged_prefill(*_args(x), **x.options)
    )


@pytest.mark.gpu
def test_repeated_launches_agree(hopper_prefill):
    args = _args(PagedCase((1024, 700), (3000, 700)).build("cuda", torch.bfloat16))
    first = hopper_prefill(*args)
    for _ in range(50):
        assert torch.equal(hopper_prefill(*args), first)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype", "taken"),
    [
        pytest.param(PagedCase((512,), (600,)), torch.bfloat16, True, id="chunk"),
        pytest.param(PagedCase((512,), (600,)), torch.float32, False, id="fp32"),
        pytest.param(PagedCase((2,), (600,)), torch.bfloat16, True, id="two-tokens"),
        pytest.param(PagedCase((2,), (90,), block_size=48), torch.bfloat16, False, id="block-48"),
        pytest.param(PagedCase((64,), (64,), dim=256), torch.bfloat16, True, id="dim-256"),
        pytest.param(PagedCase((64,), (64,), dim=96), torch.bfloat16, False, id="dim-96"),
        pytest.param(PagedCase((64,), (64,), window=9), torch.bfloat16, True, id="window"),
    ],
)
def test_launcher_takes_it_where_it_applies(
    case, dtype, taken, hopper_prefill, kernels, monkeypatch
):
    calls = []
    monkeypatch.setattr(paged_prefill_hopper, "hopper_prefill", lambda *args: calls.append(args))
    x = case.build("cuda", dtype)
    kernels.paged_prefill(*_args(x), **x.options)
    assert len(calls) == taken


def test_no_hopper_kernel_without_a_gpu():
    assert launcher._hopper_kernel(torch.device("cpu")) is None


def _cache(block_size=16, dim=128, dtype=torch.bfloat16, gap=0):
    """A cache whose blocks lie `gap` elements further apart than they must."""
    block = 2 * block_size * dim
    strides = (block + gap, block_size * dim, dim, 1)
    storage = torch.zeros(4 * (block + gap), dtype=dtype)
    return storage.as_strided((4, 2, block_size, dim), strides)


@pytest.mark.parametrize(
    ("cache", "supported"),
    [
        pytest.param(_cache(), True, id="plain"),
        pytest.param(_cache(dtype=torch.float16), True, id="fp16"),
        pytest.param(_cache(block_size=128, dim=64), True, id="dim-64-block-128"),
        pytest.param(_cache(gap=3 * 128), True, id="whole-rows-between-blocks"),
        pytest.param(_cache(gap=64), False, id="half-a-row-between-blocks"),
        pytest.param(_cache().transpose(0, 1).contiguous().transpose(0, 1), False, id="by-head"),
        pytest.param(_cache()[..., 1:], False, id="misaligned"),
        pytest.param(_cache(block_size=48), False, id="block-48"),
        pytest.param(_cache(block_size=8), False, id="block-8"),
        pytest.param(_cache(dim=256), True, id="dim-256"),
        pytest.param(_cache(dim=96), False, id="dim-96"),
        pytest.param(_cache(dtype=torch.float32), False, id="fp32"),
    ],
)
def test_supported_caches(cache, supported):
    q = torch.zeros(3, 4, cache.shape[3], dtype=cache.dtype)
    assert paged_prefill_hopper.is_supported(q, cache, cache) == supported


@pytest.mark.parametrize(
    ("dim", "rows", "heads", "groups", "splits"),
    [
        pytest.param(64, 64, 1, 1, 32, id="one-program"),
        pytest.param(64, 64, 132, 1, 1, id="one-for-each-sm"),
        pytest.param(128, 40, 8, 1, 16, id="few-rows"),
        pytest.param(128, 400, 8, 2, 4, id="some-rows"),
        pytest.param(64, 3584, 2, 3, 3, id="one-of-64-rows-for-most-sms"),
        pytest.param(128, 192, 44, 1, 1, id="rows-that-twice-as-many-would-not-fill"),
        pytest.param(64, 2048, 8, 2, 1, id="just-fits-with-128-rows"),
        pytest.param(256, 1024, 8, 2, 2, id="dim-256"),
        pytest.param(64, 100_000, 8, 3, 1, id="never-all-at-once"),
        pytest.param(256, 100_000, 8, 2, 1, id="dim-256-never-all-at-once"),
    ],
)
def test_rows_of_a_program_and_splits_of_a_context(dim, rows, heads, groups, splits):
    tiles, number = choose_tiles_and_splits(dim, LaunchRows(rows, rows, 1), heads, 4096, 132)
    assert (tiles.warp_groups, number) == (groups, splits)


def test_short_contexts_stay_whole():
    rows = LaunchRows(400, 400, 1)
    assert choose_tiles_and_splits(128, rows, 8, LONGEST_UNSPLIT, 132) == (TILES[128][0], 1)
    assert choose_tiles_and_splits(128, rows, 8, LONGEST_UNSPLIT + 16, 132) == (TILES[128][1], 4)


@pytest.mark.parametrize("size", [1, 64, 128])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (128,), (129,), (64, 64), (0, 0, 256, 0), (1, 127, 129, 5), (500, 1, 1)],
    ids=str,
)
def test_every_chunk_has_tiles_for_its_rows(lengths, size):
    rows = LaunchRows(sum(lengths), max(lengths), len(lengths))
    starts = [0, *accumulate(lengths)]
    first_tiles = [index + start // size for index, start in enumerate(starts[:-1])]
    ends = [*first_tiles[1:], rows.tiles(size)]
    used = [-(-length // size) for length in lengths]
    for first, end, tiles in zip(first_tiles, ends, used, strict=True):
        assert tiles <= end - first <= tiles + 1
    assert sum(used) <= rows.used_tiles(size)
