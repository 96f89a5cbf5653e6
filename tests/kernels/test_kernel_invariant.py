"""Operations of batch invariance: right, and a row's bits are the same in any batch.

In Triton and in plain torch, each against the usual reference and against itself in other batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from pagewire.kernels import BATCH_DEPENDENT, OP_NAMES, Ops, load_ops
from pagewire.kernels.bench.inputs import LatentCase, LatentInputs, PagedCase, PagedInputs
from pagewire.kernels.fp8_numbers import KvScales
from pagewire.kernels.gated_silu import GatedSilu

LENGTH = 70
# Where chunks of the one sequence end.
CUTS = {True: (5, 6, 40, 70), False: (1, 3, 17, 34, 66, 70)}  # packed, or one after the other
CASES = {
    "group-2": {"heads": 4, "kv_heads": 2, "dim": 16},
    "group-7-dim-24": {"heads": 7, "kv_heads": 1, "dim": 24},
    "no-group-block-32": {"heads": 2, "kv_heads": 2, "dim": 32, "block_size": 32},
    "dim-256": {"heads": 2, "kv_heads": 1, "dim": 256},
    "window": {"heads": 4, "kv_heads": 2, "dim": 16, "window": 13},
    "all-options": {
        "heads": 6, "kv_heads": 2, "dim": 32, "window": 33, "soft_cap": 1.5, "has_sinks": True,
    },
    "fp8": {"heads": 4, "kv_heads": 2, "dim": 16, "window": 33, "kv_scales": KvScales(0.5, 3.0)},
}  # fmt: skip


@pytest.fixture(scope="module", params=["triton", "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return load_ops(request.param, "cuda" if request.param == "triton" else "cpu", True)


@pytest.fixture(autouse=True)
def _product_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply each row alike, as a GPU does; on some CPUs, BLAS does not."""

    def create_dot(self: object, a: Any, b: Any, d: Any, *options: object) -> TensorHandle:
        product = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _integers(values: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _chunks(
    x: PagedInputs, ops: Ops, own: slice, starts: Sequence[int], ends: Sequence[int]
) -> torch.Tensor:
    """Attention of some queries of one sequence, as packed chunks."""
    device = str(x.q.device)
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    tables = x.block_tables.expand(len(ends), -1).contiguous()
    cumulative = _integers([0, *accumulate(lengths)], device)
    args = (x.q[own], x.k_cache, x.v_cache, tables, cumulative, _integers(ends, device))
    return ops.paged_prefill(*args, max(lengths), x.scale, **x.options)


def _prefilled(x: PagedInputs, ops: Ops, ends: Sequence[int], *, packed: bool) -> torch.Tensor:
    """Attention of all queries of one sequence, in chunks: packed, or one by one."""
    starts = [0, *ends[:-1]]
    if packed:
        return _chunks(x, ops, slice(None), starts, ends)
    each = zip(starts, ends, strict=True)
    return torch.cat([_chunks(x, ops, slice(start, end), [start], [end]) for start, end in each])


def _decoded(x: PagedInputs, ops: Ops, positions: Sequence[int]) -> torch.Tensor:
    """Attention of some queries of one sequence, as decode rows between padding."""
    rows = [0, *positions, 0]
    tables = x.block_tables.expand(len(rows), -1).contiguous()
    seq_lens = _integers([0, *(position + 1 for position in positions), 0], str(x.q.device))
    q = x.q[rows]
    out = ops.paged_decode(q, x.k_cache, x.v_cache, tables, seq_lens, x.scale, **x.options)
    assert not out[0].any() and not out[-1].any()
    return out[1:-1]


def _on_other_pages(x: PagedInputs) -> PagedInputs:
    order = torch.arange(len(x.k_cache), device=x.q.device).flip(0)
    caches = {"k_cache": x.k_cache[order], "v_cache": x.v_cache[order]}
    tables = (len(order) - 1 - x.block_tables).int()
    return PagedInputs(
        x.q, **caches, block_tables=tables, cu_query_lens=x.cu_query_lens, seq_lens=x.seq_lens,
        max_query_len=x.max_query_len, scale=x.scale, options=x.options,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_of_a_query(case, device, dtype, ops, reference, assert_close):
    if ops.backend == "torch":
        device = "cpu"
    x = PagedCase((LENGTH,), (LENGTH,), **case).build(device, dtype)
    whole = _prefilled(x, ops, (LENGTH,), packed=True)
    assert_close(whole, _prefilled(x, reference, (LENGTH,), packed=True))
    for packed, ends in CUTS.items():
        assert torch.equal(_prefilled(x, ops, ends, packed=packed), whole)
    positions = [0, 15, 16, 40, 69]
    assert torch.equal(_decoded(x, ops, positions), whole[positions])
    assert torch.equal(_decoded(x, ops, [40]), whole[[40]])
    assert torch.equal(_prefilled(_on_other_pages(x), ops, (LENGTH,), packed=True), whole)


def test_chunks_may_stand_between_other_rows(device, ops):
    if ops.backend == "torch":
        device = "cpu"
    x = PagedCase((LENGTH,), (LENGTH,), 4, 2, 16).build(device, torch.float32)
    whole = _prefilled(x, ops, (LENGTH,), packed=True)
    args = (x.k_cache, x.v_cache, x.block_tables, x.cu_query_lens + 3, x.seq_lens, LENGTH, x.scale)
    q = torch.cat([x.q[:3], x.q, x.q[:1]])
    out = ops.paged_prefill(q, *args, out=torch.full_like(q, 5.0))
    assert torch.equal(out[3:-1], whole)
    assert (out[:3] == 5.0).all() and (out[-1] == 5.0).all()


def test_decode_leaves_rows_without_a_sequence(device, ops):
    if ops.backend == "torch":
        device = "cpu"
    lengths = _integers([20, -1, 40], device)
    x = PagedCase((1, 1, 1), (20, 30, 40), 4, 2, 16).build(device, torch.float32)
    args = (x.k_cache, x.v_cache, x.block_tables)
    whole = ops.paged_decode(x.q, *args, x.seq_lens, x.scale)
    out = ops.paged_decode(x.q, *args, lengths, x.scale, out=torch.full_like(x.q, 5.0))
    assert torch.equal(out[::2], whole[::2]) and (out[1] == 5.0).all()

    y = LatentCase((20, 30, 40), None, 4, 16, 16).build(device, torch.float32)
    latents = (y.q_latent, y.q_rope, y.cache, y.block_tables)
    whole = ops.latent_attention(*latents, y.seq_lens, y.scale)
    out = ops.latent_attention(*latents, lengths, y.scale, out=torch.full_like(whole, 5.0))
    assert torch.equal(out[::2], whole[::2]) and (out[1] == 5.0).all()


def test_latent_chunks_may_stand_between_other_rows(device, ops):
    if ops.backend == "torch":
        device = "cpu"
    x = LatentCase((LENGTH,), (LENGTH,), 4, 16, 16).build(device, torch.float32)
    args = (x.cache, x.block_tables, x.seq_lens, x.scale)
    whole = ops.latent_attention(x.q_latent, x.q_rope, *args, x.cu_query_lens, LENGTH)
    q, q_rope = (torch.cat([each[:3], each, each[:1]]) for each in (x.q_latent, x.q_rope))
    out = torch.full_like(q, 5.0)
    ops.latent_attention(q, q_rope, *args, x.cu_query_lens + 3, LENGTH, out=out)
    assert torch.equal(out[3:-1], whole)
    assert (out[:3] == 5.0).all() and (out[-1] == 5.0).all()


def test_the_usual_attention_depends_on_the_batch(device, kernels):
    """So these tests can fail."""
    x = PagedCase((LENGTH,), (LENGTH,), 4, 2, 16).build(device, torch.float32)
    whole = _prefilled(x, kernels, (LENGTH,), packed=True)
    assert not torch.equal(_decoded(x, kernels, range(0, LENGTH, 5)), whole[::5])


def _latent(x: LatentInputs, ops: Ops, own: slice, *lengths: object) -> torch.Tensor:
    tables, seq_lens, *rest = lengths
    args = (x.q_latent[own], x.q_rope[own], x.cache, tables, seq_lens, x.scale)
    return ops.latent_attention(*args, *rest)


@pytest.mark.parametrize("shape", [(4, 16, 16), (3, 24, 8), (20, 32, 16)], ids=str)
def test_latent_attention_of_a_query(shape, device, dtype, ops, reference, assert_close):
    if ops.backend == "torch":
        device = "cpu"
    x = LatentCase((LENGTH,), (LENGTH,), *shape).build(device, dtype)
    one = (x.block_tables, x.seq_lens, _integers([0, LENGTH], device), LENGTH)
    whole = _latent(x, ops, slice(None), *one)
    assert_close(whole, _latent(x, reference, slice(None), *one))
    for ends in CUTS.values():
        starts = [0, *ends[:-1]]
        parts = [
            _latent(
                x, ops, slice(start, end), x.block_tables, _integers([end], device),
                _integers([0, end - start], device), end - start,
            )
            for start, end in zip(starts, ends, strict=True)
        ]  # fmt: skip
        assert torch.equal(torch.cat(parts), whole)
    last = _integers(range(LENGTH - 2, LENGTH + 1), device)
    tables = x.block_tables.expand(3, -1).contiguous()
    assert torch.equal(_latent(x, ops, slice(LENGTH - 3, None), tables, last), whole[-3:])
    padded = _latent(x, ops, slice(0, 2), tables[:2], _integers([1, 0], device))
    assert torch.equal(padded[0], whole[0]) and not padded[1].any()


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("outs", "ins"), [(64, 128), (100, 60), (1, 33)])
def test_a_product_of_a_row(outs, ins, with_bias, device, dtype, ops, reference, assert_close):
    if ops.backend == "torch":
        device = "cpu"
    x = torch.randn(150, ins, device=device).to(dtype)
    weight = (torch.randn(outs, ins, device=device) / ins**0.5).to(dtype)
    bias = torch.randn(outs, device=device).to(dtype) if with_bias else None
    all_rows = ops.linear(x, weight, bias)
    assert_close(all_rows, reference.linear(x, weight, bias))
    for start, stop in ((0, 1), (7, 8), (3, 20), (100, 150), (5, 5)):
        out = torch.empty(stop - start, outs, device=device, dtype=dtype)
        assert ops.linear(x[start:stop], weight, bias, out=out) is out
        assert torch.equal(out, all_rows[start:stop])
    strided = torch.cat([x, x], dim=1)[::2, ins:]
    assert torch.equal(ops.linear(strided, weight, bias), all_rows[::2])


def test_products_of_heads(device, dtype, ops, reference, assert_close):
    if ops.backend == "torch":
        device = "cpu"
    x = torch.randn(40, 3, 30, device=device).to(dtype)[:, :, :20]
    stored = (torch.randn(3, 20, 12, device=device) / 20**0.5).to(dtype)
    for weights in (stored, stored.transpose(1, 2).contiguous().transpose(1, 2)):
        all_rows = ops.head_products(x, weights)
        assert_close(all_rows, reference.head_products(x, weights))
        for start, stop in ((0, 1), (7, 30)):
            assert torch.equal(ops.head_products(x[start:stop], weights), all_rows[start:stop])


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
def test_experts_of_a_token(biases, device, dtype, ops, reference, assert_close):
    if ops.backend == "torch":
        device = "cpu"
    count, hidden, inner = 5, 40, 24
    x = torch.randn(90, hidden, device=device).to(dtype)
    best = torch.randn(90, count, device=device).topk(3)
    chosen, weights = best.indices.int(), best.values.softmax(-1)
    shapes = [(2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,)]
    parameters = [torch.randn(count, *shape, device=device) for shape in shapes]
    parameters = [(each / each.shape[-1] ** 0.5).to(dtype) for each in parameters]
    options = (*parameters[: 4 if biases else 2], *(() if biases else (None, None)))
    activation = GatedSilu(alpha=1.702, up_offset=1.0, limit=0.7)
    all_rows = ops.experts(x, chosen, weights, *options, activation)
    assert_close(all_rows, reference.experts(x, chosen, weights, *options, activation))
    for rows in ([0], [17, 3], list(range(30, 90)), list(range(89, -1, -1))):
        own = ops.experts(x[rows], chosen[rows], weights[rows], *options, activation)
        assert torch.equal(own, all_rows[rows])


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_all_others_are_the_usual_ones(backend: str) -> None:
    usual, invariant = (load_ops(backend, "cpu", asked) for asked in (False, True))
    assert (usual.batch_invariant, invariant.batch_invariant) == (False, True)
    for name in OP_NAMES:
        is_same = getattr(usual, name) == getattr(invariant, name)
        assert is_same == (
            name not in BATCH_DEPENDENT or (backend, name) == ("torch", "paged_decode")
        )
