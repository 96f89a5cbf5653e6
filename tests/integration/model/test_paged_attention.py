"""Attention of steps that have decode rows and chunks: one after the other, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import Ops, load_ops
from pagewire.kernels.bench.inputs import PagedCase, PagedInputs
from pagewire.shared.engine.execution.cuda_graph import GraphPool
from pagewire.shared.model.inputs import ForwardBatch
from pagewire.shared.model.paged_attention import attend

CHUNKS, CONTEXTS = (60, 7), (75, 7)


def mixed_step(decodes: int, device: str, dtype: torch.dtype) -> tuple[PagedInputs, ForwardBatch]:
    """Return decode rows and two chunks; the places of two padding rows have tokens of a chunk."""
    lengths = tuple(1 + 37 * row % 900 for row in range(decodes))
    x = PagedCase((1,) * decodes + CHUNKS, lengths + CONTEXTS, 8, 2, 64).build(device, dtype)
    nothing = x.seq_lens.new_tensor([-1] * len(CHUNKS))  # block tables of chunks, not read
    batch = ForwardBatch(
        input_ids=torch.zeros(len(x.q), dtype=torch.int64, device=device),
        positions=torch.zeros(len(x.q), dtype=torch.int64, device=device),
        slot_mapping=torch.full((len(x.q),), -1, dtype=torch.int64, device=device),
        num_decodes=decodes + len(CHUNKS),
        decode_block_tables=x.block_tables,
        decode_seq_lens=torch.cat([x.seq_lens[:decodes], nothing]),
        prefill_block_tables=x.block_tables[decodes:],
        prefill_cu_query_lens=x.cu_query_lens[decodes:],
        prefill_seq_lens=x.seq_lens[decodes:],
        max_query_len=max(CHUNKS),
    )
    return x, batch


def expected(ops: Ops, x: PagedInputs) -> torch.Tensor:
    """Attention of all rows as chunks."""
    caches = (x.k_cache, x.v_cache, x.block_tables)
    return ops.paged_prefill(x.q, *caches, x.cu_query_lens, x.seq_lens, max(CHUNKS), x.scale)


def test_padding_rows_leave_the_chunks_tokens_alone() -> None:
    ops = load_ops("torch", "cpu")
    x, batch = mixed_step(3, "cpu", torch.float32)
    out = torch.full_like(x.q, torch.nan)
    attend(ops, x.q, x.k_cache, x.v_cache, batch, x.scale, out)
    torch.testing.assert_close(out, expected(ops, x))


@pytest.mark.gpu
@pytest.mark.parametrize("decodes", [2, 20, 300])
def test_a_cuda_graph_has_the_same_result(decodes: int) -> None:
    ops = load_ops("triton", "cuda")
    x, batch = mixed_step(decodes, "cuda", torch.bfloat16)
    eager, captured = torch.empty_like(x.q), torch.empty_like(x.q)
    attend(ops, x.q, x.k_cache, x.v_cache, batch, x.scale, eager)
    torch.testing.assert_close(eager, expected(load_ops("torch", "cuda"), x), rtol=2e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(ops, x.q, x.k_cache, x.v_cache, batch, x.scale, captured)
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, eager)


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_that_share_memory_take_turns() -> None:
    """Three layers each; few decode rows split their contexts, into memory of the branch."""
    ops, pool = load_ops("triton", "cuda"), GraphPool(torch.device("cuda"))
    steps = []
    for decodes in (3, 20):
        x, batch = mixed_step(decodes, "cuda", torch.bfloat16)

        def layers(x: PagedInputs = x, batch: ForwardBatch = batch) -> torch.Tensor:
            q = x.q
            for _ in range(3):
                out = torch.empty_like(q)
                attend(ops, q, x.k_cache, x.v_cache, batch, x.scale, out)
                q = out
            return q

        # A graph reads `x` and `batch` again, which `layers` keeps.
        steps.append((layers, layers(), *pool.capture(layers)))
    for _ in range(50):
        for _, eager, graph, captured in steps:
            captured.fill_(torch.nan)
            graph.replay()
            assert torch.equal(captured, eager)
