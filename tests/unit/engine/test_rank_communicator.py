"""Sums and logits among ranks, each of which is a thread here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from pagewire.shared.base.errors import RankError
from pagewire.shared.engine.ranks.communicator import SocketCommunicator, connected

SILENT_S = 0.5


@contextmanager
def ranks(count: int) -> Iterator[list[SocketCommunicator]]:
    sockets = connected(count)
    made = [SocketCommunicator(rank, each, SILENT_S) for rank, each in enumerate(sockets)]
    yield made
    for each in made:
        each.close()


def on_each(
    communicators: list[SocketCommunicator],
    work: Callable[[SocketCommunicator], torch.Tensor],
) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(communicators)) as pool:
        return list(pool.map(work, communicators))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_have_the_same_bits_on_all_ranks(count: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(5, 64).mul(10.0**rank).to(dtype) for rank in range(count)]
    expected = parts[0].float().clone()
    for part in parts[1:]:
        expected += part.float()
    with ranks(count) as communicators:
        for _ in range(3):
            found = on_each(communicators, lambda each: each.reduce(parts[each.rank].clone()))
            assert all(torch.equal(each, expected.to(dtype)) for each in found)


def test_logits_are_joined_in_the_order_of_the_ranks() -> None:
    parts = [torch.randn(3, width) for width in (5, 4, 7)]
    with ranks(3) as communicators:
        found = on_each(communicators, lambda each: each.gather(parts[each.rank]))
    assert all(torch.equal(each, torch.cat(parts, 1)) for each in found)


def test_no_logits_have_all_columns() -> None:
    with ranks(3) as communicators:
        found = on_each(communicators, lambda each: each.gather(torch.ones(0, 4 + each.rank)))
        assert [each.shape for each in found] == [(0, 15)] * 3
        sums = on_each(communicators, lambda each: each.reduce(torch.ones(0, 4)))
        assert [each.shape for each in sums] == [(0, 4)] * 3


def test_values_larger_than_a_sockets_buffer() -> None:
    parts = [torch.randn(4_000_000) for _ in range(2)]
    with ranks(2) as communicators:
        found = on_each(communicators, lambda each: each.reduce(parts[each.rank].clone()))
    assert all(torch.equal(each, parts[0] + parts[1]) for each in found)


def test_a_rank_that_has_ended_is_named() -> None:
    with ranks(3) as communicators:
        communicators[2].close()
        with pytest.raises(RankError, match="rank 2 has ended") as caught:
            communicators[0].reduce(torch.ones(1))
        assert caught.value.rank == 2


def test_a_silent_rank_is_named_in_time() -> None:
    with ranks(3) as communicators:
        answering = ThreadPoolExecutor(1)
        other = answering.submit(communicators[1].reduce, torch.ones(1))
        with pytest.raises(RankError, match=r"rank 2 has not answered for 0\.5 s"):
            communicators[0].reduce(torch.ones(1))
        with pytest.raises(RankError, match="rank 2 has not answered"):
            other.result()
        answering.shutdown()


def test_a_rank_that_still_loads_is_waited_for() -> None:
    with ranks(2) as communicators, ThreadPoolExecutor(1) as waiting:
        communicators[0].is_loading = True
        met = waiting.submit(communicators[0].meet)
        time.sleep(2 * SILENT_S)
        assert not met.done()
        communicators[1].meet()
        met.result(10)


def test_rank_0_is_waited_for_longer_than_others() -> None:
    with ranks(3) as communicators, ThreadPoolExecutor(2) as waiting:
        others = [waiting.submit(each.reduce, torch.ones(1)) for each in communicators[1:]]
        time.sleep(3 * SILENT_S)
        assert not any(each.done() for each in others)
        assert communicators[0].reduce(torch.ones(1)).item() == 3
        for each in others:
            assert each.result(10).item() == 3
        communicators[1].rank_0_s = SILENT_S
        with pytest.raises(RankError, match=r"rank 0 has not answered for 0\.5 s"):
            communicators[1].reduce(torch.ones(1))


def test_ranks_that_compute_different_things_do_not_get_a_sum() -> None:
    with ranks(2) as communicators, pytest.raises(RankError, match="different shapes"):
        on_each(communicators, lambda each: each.reduce(torch.ones(1 + each.rank)))


def test_ranks_at_different_exchanges_do_not_get_a_sum() -> None:
    with ranks(2) as (first, second):
        second.rank_0_s = SILENT_S
        with pytest.raises(RankError, match="rank 0 has not answered"):
            second.reduce(torch.ones(1))
        assert first.reduce(torch.ones(1)).item() == 2  # with what the other rank sent then
        with pytest.raises(RankError, match="rank 0 computes another step than rank 1"):
            second.reduce(torch.ones(1))
