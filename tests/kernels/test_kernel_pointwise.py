"""Normalisation, rotation, activation and cache writes in Triton against the torch references."""

from __future__ import annotations

import pytest
import torch

# An exponential may be infinite, of which NumPy warns where kernels are interpreted.
INFINITE = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


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


@INFINITE
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 123), (3, 1500), (0, 8)])
def test_gated_activation(op, tokens, width, device, dtype, kernels, reference, assert_close):
    x = 4 * _rand(tokens, 2 * width, device=device, dtype=dtype)
    assert_close(getattr(kernels, op)(x), getattr(reference, op)(x))


@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activation_of_strided_rows(op, device, kernels, reference, assert_close):
    x = _rand(4, 100, device=device)[:, 3:91]
    assert_close(getattr(kernels, op)(x), getattr(reference, op)(x))


@INFINITE
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activation_of_large_values(op, device, kernels, reference):
    x = torch.tensor([[1e3, -1e3, 3e38, -3e38, 1.0, 1.0, 1.0, 1.0]], device=device)
    expected = torch.tensor([[1e3, 0.0, 3e38, 0.0]], device=device)
    for ops in (kernels, reference):
        assert torch.equal(getattr(ops, op)(x), expected)


@pytest.mark.parametrize("hidden", [16, 123])
def test_rms_norm_with_a_wide_weight(hidden, device, kernels, reference, assert_close):
    """The normalised value is not rounded before a float32 weight multiplies it."""
    x = _rand(64, hidden, device=device, dtype=torch.float16)
    weight = 1 + _rand(hidden, device=device)
    normed, _ = kernels.rms_norm(x, weight, 1e-5, x)
    assert normed.dtype == x.dtype
    exact = reference.rms_norm((x + x).float(), weight, 1e-5)[0].to(x.dtype)
    assert torch.equal(reference.rms_norm(x, weight, 1e-5, x)[0], exact)
    # Sums in another order may round a value the other way, but not one in a hundred.
    assert (normed != exact).float().mean() < 0.01
    rounded = reference.rms_norm(x, torch.ones_like(x[0]), 1e-5, x)[0] * weight
    assert (rounded.to(x.dtype) != exact).float().mean() > 0.05


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


@pytest.mark.parametrize("normed", ["plain", "normed", "wide"])
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
    weights = _rand(2, dim, device=device, dtype=torch.float32 if normed == "wide" else dtype)
    norms = () if normed == "plain" else (*weights, 1e-2)
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
