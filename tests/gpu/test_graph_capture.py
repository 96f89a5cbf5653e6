# mypy: allow-untyped-decorators
"""Capture of CUDA graphs: of kernels that were never launched, in memory that graphs share."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagewire.shared.engine.execution.cuda_graph import GraphPool

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@triton.jit
def _add_kernel(x_ptr, out_ptr, AMOUNT: tl.constexpr, SIZE: tl.constexpr) -> None:
    lanes = tl.arange(0, SIZE)
    tl.store(out_ptr + lanes, tl.load(x_ptr + lanes) + AMOUNT)


def add(x: torch.Tensor, amount: int) -> torch.Tensor:
    out = torch.empty_like(x)
    _add_kernel[(1,)](x, out, AMOUNT=amount, SIZE=x.shape[0])
    return out


def test_kernels_are_compiled_and_loaded_while_a_step_is_captured() -> None:
    x = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    graph, out = GraphPool(DEVICE).capture(lambda: add(x, 3))
    for value in (0, 5):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [value + 3] * 64


def test_a_result_outlives_the_replays_of_graphs_that_share_its_memory() -> None:
    pool = GraphPool(DEVICE)
    x = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    graphs = [pool.capture(lambda amount=amount: add(add(x, amount), 1)) for amount in (1, 2, 3)]
    for graph, _ in graphs:
        graph.replay()
    assert [out.tolist() for _, out in graphs] == [[amount + 1] * 64 for amount in (1, 2, 3)]


def test_a_step_that_fails_leaves_stream_and_pool_to_others() -> None:
    pool = GraphPool(DEVICE)
    x = torch.ones(64, dtype=torch.int64, device=DEVICE)
    before = torch.cuda.current_stream(DEVICE)

    def fail() -> torch.Tensor:
        add(x, 1)
        raise ValueError("no such step")

    graphs = [pool.capture(lambda: add(x, 1))]
    with pytest.raises(ValueError, match="no such step"):
        pool.capture(fail)
    assert torch.cuda.current_stream(DEVICE) == before
    graphs.append(pool.capture(lambda: add(x, 2)))
    for graph, _ in graphs:
        graph.replay()
    assert [out.tolist() for _, out in graphs] == [[2] * 64, [3] * 64]
