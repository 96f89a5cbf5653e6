# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The gated activation of Llama's feed-forward layer."""

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
def _silu_and_mul_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
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
    activated = wide / (1.0 + tl.exp(-wide))
    result = (activated * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + cols, result, mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(x[:, :I]) * x[:, I:]` in x's dtype, `[T, 2 I] -> [T, I]`."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    block = min(next_power_of_2(width), _MAX_BLOCK)
    _silu_and_mul_kernel[(tokens, -(-width // block))](
        x,
        out,
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
        **overlap_options(x.device, tokens),
    )
    return out
