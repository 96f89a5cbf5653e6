"""Normalisation, rotation, activation and cache writes in Triton against the torch references."""

from __future__ import annotations

import pytest
import torch


def _rand(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (5, 123), (3, 2048), (0, 64)])
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_rms_norm(tokens, hidden, with_residual, device, dtype, kernels, reference, assert_close):
    x = _rand(tokens, hidden, device=device, dtype=dtype)
    weight = _rand(hidden, device=device, dtype=dtype)
    residual = _rand(tokens, hidden, device=device, dtype=dtype) if with_residual else None
    normed, residual_out = kernels.rms_norm(x, weight, 1e-5, residual)
    expected, expected_residual = reference.rms_norm(x, weight, 1e-5, residual)
    assert_close(normed, expected)
    assert torch.equal(residual_out, expected_residual)
    assert with_residual or residual_out is x


def test_rms_norm_of_strided_rows(device, kernels, reference, assert_close):
    x = _rand(4, 100, device=device)[:, 3:90]
    weight = _rand(87, device=device)
    residual = _rand(8, 87, device=device)[::2]
    for actual, expected in zip(
        kernels.rms_norm(x, weight, 1e-6, residual),
        reference.rms_norm(x, weight, 1e-6, residual),
        strict=True,
    ):
        assert_close(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pointwise_at_8b_size(dtype, kernels, reference, assert_close):
    x = _rand(2048, 4096, device="cuda", dtype=dtype)
    weight = _rand(4096, device="cuda", dtype=dtype)
    for actual, expected in zip(
        kernels.rms_norm(x, weight, 1e-5, x), reference.rms_norm(x, weight, 1e-5, x), strict=True
    ):
        assert_close(actual, expected)
    gate_up = _rand(2048, 28672, device="cuda", dtype=dtype)
    assert_close(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 123), (3, 1500), (0, 8)])
def test_silu_and_mul(tokens, width, device, dtype, kernels, reference, assert_close):
    x = 4 * _rand(tokens, 2 * width, device=device, dtype=dtype)
    assert_close(kernels.silu_and_mul(x), reference.silu_and_mul(x))


def test_silu_and_mul_of_strided_rows(device, kernels, reference, assert_close):
    x = _rand(4, 100, device=device)[:, 3:91]
    assert_close(kernels.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [(1, 4, 4, 16), (5, 12, 4, 32), (7, 9, 3, 64), (3, 32, 8, 128), (0, 4, 2, 16), (2, 3, 1, 24)],
)
def test_rotary_embedding_in_a_fused_projection(
    tokens, heads, kv_heads, dim, device, dtype, kernels, reference, assert_close
):
    fused = _rand(tokens, heads + 2 * kv_heads, dim, device=device, dtype=dtype)
    positions = torch.randint(0, 50, (tokens,), device=device)
    angles = torch.rand(50, dim // 2, device=device) * 6
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    expected = fused.clone()
    kernels.rotary_embedding(positions, fused[:, :heads], fused[:, heads : heads + kv_heads], cache)
    reference.rotary_embedding(
        positions, expected[:, :heads], expected[:, heads : heads + kv_heads], cache
    )
    assert_close(fused, expected)
    assert torch.equal(fused[:, heads + kv_heads :], expected[:, heads + kv_heads :])


@pytest.mark.parametrize(
    ("heads", "dim", "block_size"), [(1, 16, 16), (3, 32, 16), (8, 128, 32), (2, 24, 16)]
)
def test_reshape_and_cache(heads, dim, block_size, device, dtype, kernels, reference):
    blocks = 5
    pool = _rand(blocks, 2, 2, heads, block_size, dim, device=device, dtype=dtype)
    expected = pool.clone()
    fused = _rand(6, 3 * heads, dim, device=device, dtype=dtype)
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    last = blocks * block_size - 1
    slots = torch.tensor([3, -1, last, 0, block_size, -1], device=device)
    kernels.reshape_and_cache(key, value, pool[:, 1, 0], pool[:, 1, 1], slots)
    reference.reshape_and_cache(key, value, expected[:, 1, 0], expected[:, 1, 1], slots)
    assert torch.equal(pool, expected)
    assert torch.equal(pool[-1, 1, 1, :, -1], value[2])


def test_reshape_and_cache_of_nothing(device, kernels):
    cache = torch.zeros(2, 1, 16, 16, device=device)
    nothing = torch.zeros(0, 1, 16, device=device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    kernels.reshape_and_cache(nothing, nothing, cache, cache, slots)
    assert not cache.any()
