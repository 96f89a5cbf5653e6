"""Attention of chunks to keys and values made of latent vectors: reference and Triton kernels."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import latent_prefill as prefill_module
from pagewire.kernels import latent_sizes
from pagewire.kernels.bench.inputs import LatentCase, LatentChunks, LatentChunksCase
from pagewire.kernels.errors import UnsupportedShapeError

# Heads, numbers of a latent vector and of a rotated key; then numbers of a key and of a value.
SMALL, ODD = (2, 16, 16), (3, 24, 8)
CASES = {
    "one-token": LatentChunksCase(LatentCase((1,), (1,), *SMALL), 16, 16),
    "whole-prompts": LatentChunksCase(LatentCase((40, 3, 17), (40, 3, 17), *ODD), 12, 10),
    "ragged-prefixes": LatentChunksCase(LatentCase((33, 40, 128), (1, 17, 33), *ODD), 20, 24),
    "tile-edges": LatentChunksCase(LatentCase((128, 129), (64, 65), *SMALL), 16, 32),
    "block-32": LatentChunksCase(LatentCase((200,), (37,), *SMALL, block_size=32), 32, 16),
    "deepseek-v2-lite": LatentChunksCase(LatentCase((70, 20), (9, 20), 2, 512, 64), 128, 128),
}
LARGE = (
    LatentChunksCase(LatentCase((900, 700, 9000, 64), (257, 700, 129, 64), 16, 512, 64), 128, 128),
    LatentChunksCase(LatentCase((2500,), (2000,), 128, 512, 64), 128, 128),
    LatentChunksCase(LatentCase((40_000,), (600,), 16, 512, 64), 128, 128),
)


def _attend(x: LatentChunks, ops) -> torch.Tensor:
    out = torch.full_like(x.out, 5.0)
    ops.latent_prefill(*x._replace(out=out))
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_the_absorbed_form(case, reference, assert_close):
    x = case.build("cpu", torch.float32)
    q_latent = reference.head_products(x.q_nope, x.key_matrices)
    absorbed = reference.latent_attention(
        q_latent, x.q_rope, x.cache, x.block_tables, x.seq_lens, x.scale, x.cu_query_lens
    )
    expected = reference.head_products(absorbed, x.value_matrices)
    assert_close(_attend(x, reference), expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_matches_the_reference(case, device, kernels, reference, assert_close):
    x = case.build(device, torch.float32)
    assert_close(_attend(x, kernels), _attend(x, reference))


@pytest.mark.parametrize("tokens", [7, 16, 50])
@pytest.mark.parametrize("name", ["whole-prompts", "ragged-prefixes", "tile-edges"])
def test_any_number_of_parts(name, tokens, device, kernels, reference, assert_close, monkeypatch):
    x = CASES[name].build(device, torch.float32)
    of_token = 4 * x.q_nope.shape[1] * (x.q_nope.shape[2] + x.out.shape[2])
    monkeypatch.setattr(latent_sizes, "WORKSPACE_BYTES", tokens * of_token)
    assert_close(_attend(x, kernels), _attend(x, reference))


def test_half_precision(device, dtype, kernels, reference, assert_close):
    for name in ("ragged-prefixes", "deepseek-v2-lite"):
        x = CASES[name].build(device, dtype)
        assert_close(_attend(x, kernels), _attend(x, reference))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=["ragged", "many-heads", "long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_shapes(case, dtype, kernels, reference, assert_close):
    x = case.build("cuda", dtype)
    assert_close(_attend(x, kernels), _attend(x, reference))


def test_rows_around_the_chunks_stay(device, kernels, reference):
    case = LatentChunksCase(LatentCase((40, 20), (7, 3), *SMALL), 16, 16)
    x = case.build(device, torch.float32)
    x = x._replace(chunks=((4, 40), (2, 20)), cu_query_lens=x.cu_query_lens.clone())
    x.cu_query_lens.copy_(torch.tensor([2, 6, 8]))
    for ops in (kernels, reference):
        out = _attend(x, ops)
        assert (out[:2] == 5.0).all() and (out[8:] == 5.0).all()
        assert not (out[2:8] == 5.0).any()


def test_shapes_that_are_refused():
    x = CASES["one-token"].build("cpu", torch.float32)
    swapped = x.q_nope.transpose(1, 2).contiguous().transpose(1, 2)
    for wrong in (
        {"key_matrices": x.key_matrices[:, :, :8]},
        {"value_matrices": x.value_matrices[:1]},
        {"q_nope": swapped},
    ):
        with pytest.raises(UnsupportedShapeError, match="attention needs"):
            prefill_module.latent_prefill(*x._replace(**wrong))
