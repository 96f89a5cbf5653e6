"""Captured launches replay with other metadata, since no launcher looks at a tensor's values."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.bench.four_bit_cases import random_weights
from pagewire.kernels.bench.inputs import PagedCase, decode_case, sampling_inputs
from pagewire.kernels.kv_staging import make_copy_list, packed_bytes
from pagewire.kernels.routing import Routing

pytestmark = pytest.mark.gpu


def _capture(run):
    """Warm up and capture `run`; return the graph and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_decode_replays_with_other_lengths(rows, kernels, reference, assert_close):
    x = decode_case((600,) * rows).build("cuda", torch.bfloat16, poison=False)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, x.seq_lens, x.scale)
    graph, out = _capture(lambda: kernels.paged_decode(*args))
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        x.seq_lens.copy_(torch.randint(0, 601, (rows,), generator=generator, device="cuda"))
        x.block_tables.copy_(x.block_tables.flip(0))
        graph.replay()
        assert_close(out, reference.paged_decode(*args))


def test_prefill_replays_with_other_lengths(kernels, reference, assert_close):
    x = PagedCase((64, 64), (200, 300)).build("cuda", torch.bfloat16, poison=False)
    lengths = (x.cu_query_lens, x.seq_lens, x.max_query_len)
    args = (x.q, x.k_cache, x.v_cache, x.block_tables, *lengths, x.scale)
    graph, out = _capture(lambda: kernels.paged_prefill(*args))
    x.seq_lens.copy_(torch.tensor([64, 17]))
    for starts in ([0, 50, 60], [4, 50, 60]):
        x.cu_query_lens.copy_(torch.tensor(starts))
        graph.replay()
        own = slice(starts[0], 60)
        assert_close(out[own], reference.paged_prefill(*args)[own])


def test_sampling_replays_with_other_parameters(kernels, reference):
    x = sampling_inputs(torch.randn(16, 32000, device="cuda"))
    graph, out = _capture(lambda: kernels.sample(*x))
    x.temperature.fill_(1.0)
    x.temperature[::3] = 0.0
    x.top_k.fill_(40)
    x.top_p[8:] = 0.8
    x.positions.add_(100)
    graph.replay()
    assert torch.equal(out, reference.sample(*x))


def test_a_layers_small_kernels_replay_with_other_inputs(kernels, reference, assert_close):
    hidden = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(20, 2, 2, 32, 16, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.full((8,), -1, device="cuda")
    positions = torch.arange(8, device="cuda")
    cos_sin = torch.rand(8, 128, device="cuda")
    down = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16) / 45

    def run():
        normed, _ = kernels.rms_norm(hidden, weight, 1e-5, hidden)
        q, v = normed.clone().view(8, 32, 128), normed.view(8, 32, 128)
        caches = cache[:, 1, 0], cache[:, 1, 1]
        kernels.rotary_and_cache(positions, q, v, v, cos_sin, *caches, slots)
        return kernels.linear(kernels.silu_and_mul(normed), down)

    graph, out = _capture(run)
    assert not cache.any()
    hidden.normal_()
    slots.copy_(torch.arange(8) * 17)
    graph.replay()
    normed, _ = reference.rms_norm(hidden, weight, 1e-5, hidden)
    assert_close(out, reference.linear(reference.silu_and_mul(normed), down))
    assert_close(cache[7 * 17 // 16, 1, 1, :, 7 * 17 % 16], normed[7].view(32, 128))


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_experts_replay_with_another_routing(tokens, kernels, reference, assert_close):
    """One token, few of them, and as many as have a list of tiles."""
    routing = Routing(top_k=2, renormalise=True)
    logits = torch.zeros(tokens, 16, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(16, 512, 512, device="cuda", dtype=torch.bfloat16) / 23
    down = torch.randn(16, 512, 256, device="cuda", dtype=torch.bfloat16) / 16

    def run(ops):
        return ops.experts(hidden, *ops.route(logits, routing), gate_up, down)

    graph, out = _capture(lambda: run(kernels))
    for _ in range(3):
        logits.normal_()
        hidden.normal_()
        graph.replay()
        assert_close(out, run(reference))


@pytest.mark.parametrize("kind", ["e2m1", "integers"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_experts_in_four_bits_replay_with_another_routing(
    tokens, kind, kernels, reference, assert_close
):
    routing = Routing(top_k=2, renormalise=True)
    logits = torch.zeros(tokens, 16, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    gate_up = random_weights(16, 512, 512, kind=kind)
    down = random_weights(16, 512, 256, kind=kind)

    def run(ops):
        return ops.four_bit_experts(hidden, *ops.route(logits, routing), gate_up, down)

    graph, out = _capture(lambda: run(kernels))
    for _ in range(3):
        logits.normal_()
        hidden.normal_()
        graph.replay()
        assert_close(out, run(reference))


def test_packing_replays_with_other_blocks(kernels, reference):
    pool = torch.randn(32, 4096, device="cuda")
    copy_list = make_copy_list(range(4), 5).to("cuda")
    staging = torch.zeros(packed_bytes(4, 4096 * 4), dtype=torch.uint8, device="cuda")
    graph, _ = _capture(lambda: kernels.pack_blocks(pool, copy_list, staging))
    staging.zero_()
    copy_list[:5] = make_copy_list([31, 7, 9], 6).to("cuda")
    graph.replay()
    expected = torch.zeros_like(staging)
    reference.pack_blocks(pool, copy_list, expected)
    assert torch.equal(staging, expected)
