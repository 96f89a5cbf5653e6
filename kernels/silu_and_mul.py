# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The gated activations of feed-forward layers: Llama's SiLU, Gemma's GELU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import (
    await_predecessor,
    next_power_of_2,
    overlap_options,
)

_MAX_BLOCK = 1024


@triton.jit
def _gated_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    gate_ptr = x_ptr + row * x_stride + cols
    await_predecessor(OVERLAPS)
    gate = tl.load(gate_ptr, mask=mask, other=0.0)
    up = tl.load(gate_ptr + WIDTH, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    exponent = wide
    if GELU:
        # (1 + tanh(u)) / 2 = sigmoid(2 u), for u = sqrt(2 / pi) (x + 0.044715 x^3)
        exponent = 1.5957691216057308 * wide * (1.0 + 0.044715 * wide * wide)
    activated = wide / (1.0 + tl.exp(-exponent))
    result = (activated * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + cols, result, mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(x[:, :I]) * x[:, I:]` in x's dtype, `[T, 2 I] -> [T, I]`."""
    return _gated(x, gelu=False)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `gelu(x[:, :I]) * x[:, I:]` in x's dtype, `[T, 2 I] -> [T, I]`."""
    return _gated(x, gelu=True)


def _gated(x: torch.Tensor, gelu: bool) -> torch.Tensor:
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    block = min(next_power_of_2(width), _MAX_BLOCK)
    _gated_kernel[(tokens, -(-width // block))](
        x,
        out,
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        GELU=gelu,
        num_warps=4,
        **overlap_options(x.device, tokens),
    )
    return out
