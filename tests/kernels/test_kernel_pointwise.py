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
    ("tokens", "heads", "kv_heads", "dim", "block_size"),
    [
        (1, 4, 4, 16, 16),
        (5, 12, 4, 32, 16),
        (7, 9, 3, 64, 32),
        (3, 32, 8, 128, 16),
        (0, 4, 2, 16, 16),
        (2, 3, 1, 24, 16),
        (4, 18, 9, 32, 16),
    ],
)
def test_rotary_and_cache_of_a_fused_projection(
    tokens, heads, kv_heads, dim, block_size, device, dtype, kernels, reference, assert_close
):
    fused = _rand(tokens, heads + 2 * kv_heads, dim, device=device, dtype=dtype)
    pool = _rand(5, 2, 2, kv_heads, block_size, dim, device=device, dtype=dtype)
    positions = torch.randint(0, 50, (tokens,), device=device)
    angles = torch.rand(50, dim // 2, device=device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    last = 5 * block_size - 1
    slots = torch.tensor([3, -1, last, 0, block_size, -1, 7], device=device)[:tokens]
    expected, expected_pool, before = fused.clone(), pool.clone(), fused.clone()
    for ops, x, cache in (kernels, fused, pool), (reference, expected, expected_pool):
        q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
        ops.rotary_and_cache(positions, q, k, v, cos_sin, cache[:, 1, 0], cache[:, 1, 1], slots)
    assert_close(fused, expected)
    assert torch.equal(fused[:, heads:], before[:, heads:])
    assert_close(pool[:, 1, 0], expected_pool[:, 1, 0])
    assert torch.equal(pool[:, 0], expected_pool[:, 0])
    assert torch.equal(pool[:, 1, 1], expected_pool[:, 1, 1])
    if tokens > 2:
        assert torch.equal(pool[-1, 1, 1, :, -1], before[2, heads + kv_heads :])


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"),
    [(4, 2, 32, 32), (7, 1, 32, 24), (9, 9, 24, 6), (10, 2, 16, 0), (3, 1, 24, 0)],
    ids=["all", "three-quarters", "a-quarter", "nothing", "nothing-of-24"],
)
def test_rotary_and_cache_of_a_part_and_with_norms(
    heads, kv_heads, dim, rotated, normed, device, dtype, kernels, reference, assert_close
):
    fused = _rand(5, heads + 2 * kv_heads, dim, device=device, dtype=dtype)
    pool = _rand(3, 2, 2, kv_heads, 16, dim, device=device, dtype=dtype)
    positions = torch.tensor([0, 3, 49, 7, 8], device=device)
    slots = torch.tensor([3, -1, 47, 16, 0], device=device)
    angles = torch.rand(50, rotated // 2, device=device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1) if rotated else None
    norms = (*_rand(2, dim, device=device, dtype=dtype), 1e-2) if normed else ()
    expected, expected_pool, before = fused.clone(), pool.clone(), fused.clone()
    for ops, x, cache in (kernels, fused, pool), (reference, expected, expected_pool):
        q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
        caches = cache[:, 1, 0], cache[:, 1, 1]
        ops.rotary_and_cache(positions, q, k, v, cos_sin, *caches, slots, *norms)
    assert_close(fused, expected)
    assert torch.equal(fused[:, heads:], before[:, heads:])
    assert_close(pool[:, 1, 0], expected_pool[:, 1, 0])
    assert torch.equal(pool[:, 0], expected_pool[:, 0])
    assert torch.equal(pool[:, 1, 1], expected_pool[:, 1, 1])
