"""Sums and logits among ranks in processes of their own, on one GPU and on two."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from pagewire.tests.support.child_process import Remote
from pagewire.tests.support.exchanging_ranks import Call
from pagewire.tests.support.gpu_ranks import gpu_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PLACES = [
    pytest.param((0, 0), id="one-gpu"),
    pytest.param((0, 0, 0), id="three-ranks-on-one-gpu"),
    pytest.param((0, 1), id="two-gpus", marks=TWO_GPUS),
]


def calls_of(count: int) -> list[Call]:
    """Return sums of a token, of some, and of more than a round takes; odd and even widths."""
    shapes: list[tuple[int, tuple[int, ...]]] = [(rows, (4096,)) for rows in (1, 37, 700)]
    shapes += [(3, (1,))]
    shapes += [(2, (64, 80, 96)[:count]), (40, (801, 801, 800)[-count:])]
    return [
        Call(seed, dtype, rows, widths)
        for dtype in ("float32", "bfloat16")
        for seed, (rows, widths) in enumerate(shapes)
    ]


def on_all(ranks: list[Remote], method: str, *args: Any) -> list[Any]:
    """Call a method of all ranks at the same time; return what each returned."""
    return [reply.wait() for reply in [rank.start(method, *args) for rank in ranks]]


@pytest.mark.parametrize("gpus", PLACES)
def test_results_have_the_bits_of_the_reference(gpus: tuple[int, ...]) -> None:
    calls = calls_of(len(gpus))
    with gpu_ranks(gpus) as ranks:
        on_all(ranks, "rehearse", calls)
        for _ in range(3):
            assert on_all(ranks, "run", calls) == [[]] * len(gpus)
        assert on_all(ranks, "missing") == [None] * len(gpus)


@pytest.mark.parametrize("gpus", PLACES)
def test_a_graph_is_replayed_with_other_values(gpus: tuple[int, ...]) -> None:
    calls = calls_of(len(gpus))[:6]
    with gpu_ranks(gpus) as ranks:
        on_all(ranks, "rehearse", calls)
        for _ in range(2):
            assert on_all(ranks, "replay", calls, range(10)) == [[]] * len(gpus)
        assert on_all(ranks, "run", calls) == [[]] * len(gpus)


@pytest.mark.parametrize("gpus", PLACES)
def test_a_rank_that_ends_is_named_in_time(gpus: tuple[int, ...]) -> None:
    calls = calls_of(len(gpus))[:1]
    later = [calls[0]._replace(seed=seed) for seed in range(1, 100)]
    with gpu_ranks(gpus, timeout_s=1.0) as ranks:
        on_all(ranks, "rehearse", calls)
        assert on_all(ranks, "run", calls) == [[]] * len(gpus)
        lost = ranks.pop()
        lost.child.kill()
        begin = time.monotonic()
        assert on_all(ranks, "run", later) == [later] * len(ranks)
        assert on_all(ranks, "missing") == [len(ranks)] * len(ranks)
        assert time.monotonic() - begin < 10, "it has waited for each sum"


@pytest.mark.parametrize("gpus", PLACES)
def test_closing_frees_the_memory_and_ends_what_waits(gpus: tuple[int, ...]) -> None:
    calls = calls_of(len(gpus))[:1]
    with gpu_ranks(gpus, timeout_s=100.0) as ranks:
        on_all(ranks, "rehearse", calls)
        on_all(ranks, "run", calls)
        on_all(ranks, "close")
        lost = []  # other tests may take memory of the GPU meanwhile
        while not lost or (min(lost) > 4 << 20 and len(lost) < 10):
            free = ranks[0].call("free_bytes")
            for _ in range(3):
                on_all(ranks, "open")
                assert on_all(ranks, "run", calls) == [[]] * len(gpus)
                on_all(ranks, "close")
            lost.append(free - ranks[0].call("free_bytes"))
        assert min(lost) <= 4 << 20
        on_all(ranks, "open")
        begin = time.monotonic()
        ranks[0].call("launch", calls[0])
        ranks[0].call("close")
        assert time.monotonic() - begin < 50
