"""Sums and joined columns of several ranks, which run at the same time."""

from __future__ import annotations

import time

import pytest
import torch

from pagewire.kernels.all_gather import Columns, all_gather
from pagewire.kernels.all_reduce import all_reduce
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.rank_memory import buffer_bytes, make_rank_memory
from pagewire.kernels.reference.all_gather import all_gather as reference_gather
from pagewire.kernels.reference.all_reduce import all_reduce as reference_reduce
from pagewire.tests.support.exchanging_ranks import (
    Call,
    compile_kernels,
    exchanging_ranks,
    rank_views,
    start_all,
    sums,
)

PROGRAMS = 3
# One value; a part of a block, whole blocks, some of which a program has several.
SIZES = (1, 1000, 1024, 7 * 1024 + 5)
JOINED = {2: (5, 4), 4: (16, 48, 32, 1024 + 16)}


def calls_of(count, dtype):
    name = str(dtype).removeprefix("torch.")
    added = [sums(seed, size, name) for seed, size in enumerate(SIZES)]
    joined = [Call(100 + rows, name, rows, JOINED[count]) for rows in (1, 3)]
    two_shot = [Call(200, name, 1, (size,), 0) for size in (5, 3000, 4 * 7 * 1024 + 5)]
    normed = [
        Call(300 + rows, name, rows, (width,), norm=norm)
        for rows, width, norm in ((1, 600, "alone"), (PROGRAMS, 1024, "residual"))
    ]
    return [*added, *joined, *two_shot, *normed, *added[:2], Call(7, name, 3, (600,))]


@pytest.mark.parametrize("count", [2, 4])
def test_results_have_the_bits_of_the_reference(device, dtype, count, tmp_path):
    calls = calls_of(count, dtype)
    compile_kernels(device, count, PROGRAMS, calls)
    with exchanging_ranks(device, tmp_path / "memory", count, programs=PROGRAMS) as ranks:
        for _ in range(2):
            assert start_all(ranks, calls) == [[]] * count
        assert [rank.call("missing") for rank in ranks] == [None] * count


def test_a_slow_rank_reads_what_was_sent_to_it(device, tmp_path):
    """The others are ready for each round before it has read the one before."""
    calls = [sums(seed, 500 + seed, "float32") for seed in range(12)]
    compile_kernels(device, 3, PROGRAMS, calls[:1])
    with exchanging_ranks(device, tmp_path / "memory", 3, programs=PROGRAMS) as ranks:
        assert start_all(ranks, calls, [0.0, 0.02]) == [[]] * 3


def test_a_rank_that_does_not_come_is_named_in_time(device, tmp_path):
    call = sums(1, 900, "float32")
    later = [sums(seed, 2500, "float32") for seed in range(2, 8)]  # by more programs
    compile_kernels(device, 3, PROGRAMS, [call, *later])
    with exchanging_ranks(device, tmp_path / "memory", 3, 0.4, PROGRAMS) as (absent, *present):
        begin = time.monotonic()
        assert start_all(present, [call]) == [[call]] * 2
        waited_s = time.monotonic() - begin
        assert [rank.call("missing") for rank in present] == [0, 0]
        # Nobody waits again, nor sends what the absent one could take for a later round.
        assert [rank.call("run", later) for rank in present] == [later] * 2
        assert time.monotonic() - begin < 2 * waited_s
        assert [rank.call("missing") for rank in present] == [0, 0]
        # It still gets the first sum, and no other.
        assert absent.call("run", [call, *later[:2]]) == later[:2]
        assert absent.call("missing") in (1, 2)


@pytest.mark.gpu
def test_a_graph_is_replayed_any_number_of_times():
    calls = [sums(0, 3 * 4096, "bfloat16"), Call(1, "bfloat16", 3, (600, 200))]
    compile_kernels("cuda", 2, PROGRAMS, calls)
    size = buffer_bytes(2, PROGRAMS)
    buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    views = rank_views(buffers, torch.device("cuda"), 5.0, PROGRAMS)
    columns = Columns.of((600, 200), torch.device("cuda"))
    added = torch.empty(2, 3, 4096, device="cuda", dtype=torch.bfloat16)
    joined = [torch.empty(3, width, device="cuda", dtype=torch.bfloat16) for width in (600, 200)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    graphs, results = [], []
    for x, part, view in zip(added, joined, views, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append((all_gather(part, columns, view), all_reduce(x.clone(), view)))
    for seed in range(5):
        torch.manual_seed(seed)
        for each in (added, *joined):
            each.normal_()
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for whole, total in results:
            assert torch.equal(whole, reference_gather(joined))
            assert torch.equal(total, reference_reduce(added.unbind()))


def test_what_ranks_cannot_exchange_is_refused():
    memory = make_rank_memory(0, [0, 0], torch.device("cpu"), 1.0)
    with pytest.raises(UnsupportedShapeError, match="add up torch"):
        all_reduce(torch.ones(2, 2, dtype=torch.int64), memory)
    with pytest.raises(UnsupportedShapeError, match=r"strides \(1, 2\)"):
        all_reduce(torch.ones(2, 2).t(), memory)
    columns = Columns.of((3, 4), torch.device("cpu"))
    with pytest.raises(UnsupportedShapeError, match=r"with \(3, 4\) columns"):
        all_gather(torch.ones(2, 2), columns, memory)


def test_nothing_is_exchanged_without_rows():
    memory = make_rank_memory(0, [0, 0], torch.device("cpu"), 1.0)
    assert all_reduce(torch.ones(0, 4), memory).shape == (0, 4)
    columns = Columns.of((3, 4), torch.device("cpu"))
    assert all_gather(torch.ones(0, 3), columns, memory).shape == (0, 7)
