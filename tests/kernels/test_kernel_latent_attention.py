"""Attention to latent vectors, and their cache: references and Triton kernels."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import _decode_splits as splits_module
from pagewire.kernels import latent_attention as attention_module
from pagewire.kernels.bench.inputs import LatentCase
from pagewire.kernels.errors import UnsupportedShapeError

# Heads, numbers of a latent vector and of a rotated key.
SMALL, ODD, WIDE = (4, 16, 16), (3, 24, 8), (20, 32, 16)
DECODE = (1, 15, 16, 17, 0, 100)
CASES = {
    "decode-block-boundaries": LatentCase(DECODE, None, *SMALL),
    "decode-odd-sizes": LatentCase(DECODE, None, *ODD),
    "decode-more-heads-than-a-tile": LatentCase((40, 0, 130), None, *WIDE),
    "decode-block-32": LatentCase((31, 32, 33), None, *SMALL, block_size=32),
    "one-token": LatentCase((1,), (1,), *SMALL),
    "ragged-prefixes": LatentCase((1, 40, 20, 128), (1, 17, 0, 33), *ODD),
    "chunk-at-tile-edges": LatentCase((128, 129), (64, 65), *SMALL),
    "tile-across-queries": LatentCase((30, 9), (11, 9), *WIDE),
    "block-32": LatentCase((300,), (37,), *SMALL, block_size=32),
    "deepseek-v2-lite": LatentCase((70, 3), (9, 3), 16, 512, 64),
}


def _attend(x, ops):
    args = (x.q_latent, x.q_rope, x.cache, x.block_tables, x.seq_lens, x.scale)
    return ops.latent_attention(*args, *x.lengths)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_softmax_over_the_context(case, reference, assert_close):
    """Token by token, in float64."""
    x = case.build("cpu", torch.float32)
    out = _attend(x, reference)
    query_lens = case.query_lens or (1,) * len(case.seq_lens)
    row = 0
    for table, query_len, seq_len in zip(x.block_tables, query_lens, case.seq_lens, strict=True):
        for position in range(seq_len - query_len, seq_len):
            if position < 0:  # an empty sequence
                assert not out[row].any()
            else:
                cached = torch.stack(
                    [
                        x.cache[int(table[t // case.block_size]), t % case.block_size]
                        for t in range(position + 1)
                    ]
                ).double()
                latents, keys = cached.split([case.rank, case.rotated], dim=1)
                scores = x.q_latent[row].double() @ latents.T + x.q_rope[row].double() @ keys.T
                assert_close(out[row], (torch.softmax(scores * x.scale, -1) @ latents).float())
            row += 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_matches_the_reference(case, device, kernels, reference, assert_close):
    x = case.build(device, torch.float32)
    assert_close(_attend(x, kernels), _attend(x, reference))


@pytest.mark.parametrize("least_tiles", [1, 1000], ids=["by-length", "even"])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_any_number_of_splits(
    splits, least_tiles, device, kernels, reference, assert_close, monkeypatch
):
    monkeypatch.setattr(splits_module, "choose_splits", lambda *_: splits)
    monkeypatch.setattr(splits_module, "_LEAST_TILES", least_tiles)
    x = LatentCase((1, 0, 129, 300), None, *WIDE).build(device, torch.float32)
    assert_close(_attend(x, kernels), _attend(x, reference))
    x.seq_lens[2] = -1  # no sequence
    for ops in (kernels, reference):
        args = (x.q_latent, x.q_rope, x.cache, x.block_tables, x.seq_lens, x.scale)
        out = ops.latent_attention(*args, out=torch.full_like(x.q_latent, 5.0))
        assert (out[2] == 5.0).all() and not (out[[0, 1, 3]] == 5.0).any()


def test_half_precision(device, dtype, kernels, reference, assert_close):
    for query_lens in (None, (5, 40)):
        x = LatentCase((5, 70), query_lens, *WIDE).build(device, dtype)
        assert_close(_attend(x, kernels), _attend(x, reference))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_shapes(heads, dtype, kernels, reference, assert_close):
    shapes = (((1, 127, 129, 0, 4000, 9000), None), ((900, 700, 9000, 64), (1, 700, 129, 64)))
    for seq_lens, query_lens in shapes:
        x = LatentCase(seq_lens, query_lens, heads, 512, 64).build("cuda", dtype)
        assert_close(_attend(x, kernels), _attend(x, reference))


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths(kernels, reference, assert_close):
    x = LatentCase((600,) * 8, None, 16, 512, 64).build("cuda", torch.bfloat16, poison=False)
    _attend(x, kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _attend(x, kernels)
    x.seq_lens.copy_(torch.tensor([0, 1, 600, 32, 33, 599, 64, 5]))
    graph.replay()
    assert_close(out, _attend(x, reference))


def test_rows_around_the_queries_stay(device, kernels, reference):
    x = LatentCase((40, 20), (7, 3), *SMALL).build(device, torch.float32)
    for starts in ([0, 4, 6], [2, 4, 7]):
        x.cu_query_lens.copy_(torch.tensor(starts))
        own = slice(starts[0], starts[-1])
        for ops in (kernels, reference):
            out = torch.full_like(x.q_latent, 5.0)
            args = (x.q_latent, x.q_rope, x.cache, x.block_tables, x.seq_lens, x.scale)
            ops.latent_attention(*args, x.cu_query_lens, 7, out=out)
            assert (out[: own.start] == 5.0).all() and (out[own.stop :] == 5.0).all()
            assert not (out[own] == 5.0).any()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("shape", [SMALL, ODD, WIDE], ids=["small", "odd", "wide"])
def test_rows_of_the_cache(shape, interleaved, device, dtype, kernels, reference, assert_close):
    heads, rank, rotated = shape
    projected = torch.randn(5, heads * (6 + rotated) + rank + rotated, device=device).to(dtype)
    pool = torch.zeros(4, 2, 1, 1, 16, rank + rotated, device=device, dtype=dtype)
    angles = 6 * torch.rand(50, rotated // 2, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    norm = torch.randn(rank, device=device).to(dtype)
    positions = torch.tensor([0, 5, 49, 1, 2], device=device)
    slots = torch.tensor([63, 17, -1, 16, 0], device=device)

    def run(ops):
        x, cache = projected.clone(), pool.clone()
        q, latent, k = x.split([heads * (6 + rotated), rank, rotated], dim=1)
        q_rope = q.unflatten(1, (heads, -1))[:, :, 6:]
        args = (positions, q_rope, latent, k, cos_sin, cache[:, 1, 0, 0], slots, norm, 1e-6)
        ops.latent_rotary_and_cache(*args, interleaved)
        return x, cache

    for actual, expected in zip(run(kernels), run(reference), strict=True):
        assert_close(actual, expected)


def test_rotation_is_hugging_faces(reference):
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb

    positions = torch.tensor([0, 5, 49, 1])
    angles = torch.rand(50, 8) * 6
    q, k, latent = torch.randn(4, 6, 16), torch.randn(4, 16), torch.randn(4, 24)
    turns = torch.polar(torch.ones(4, 8), angles[positions])[None]
    expected_q, expected_k = apply_rotary_emb(q.transpose(0, 1)[None], k[None, None], turns)
    cache = torch.zeros(2, 16, 40)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    args = (positions, q, latent, k, cos_sin, cache, torch.arange(4), torch.ones(24), 1e-6, True)
    reference.latent_rotary_and_cache(*args)
    torch.testing.assert_close(q, expected_q[0].transpose(0, 1))
    torch.testing.assert_close(cache[0, :4, 24:], expected_k[0, 0])
    squares = latent.pow(2).mean(-1, keepdim=True)
    torch.testing.assert_close(cache[0, :4, :24], latent * torch.rsqrt(squares + 1e-6))


def test_shapes_that_are_refused():
    x = LatentCase((3,), None, 2, 16, 16).build("cpu", torch.float32)
    metadata = (x.block_tables, x.seq_lens, x.scale)
    wide = torch.zeros(1, 2, 520)
    for wrong in (
        (wide, x.q_rope, torch.zeros(2, 16, 536)),
        (x.q_latent, wide, torch.zeros(2, 16, 536)),
        (x.q_latent, x.q_rope[:, :, :8], x.cache),
        (x.q_latent.transpose(1, 2).contiguous().transpose(1, 2), x.q_rope, x.cache),
    ):
        with pytest.raises(UnsupportedShapeError, match="attention needs"):
            attention_module.latent_attention(*wrong, *metadata)
