# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""RMS normalisation, optionally after adding a residual, in one pass over each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import (
    await_predecessor,
    next_power_of_2,
    overlap_options,
)


@triton.jit
def normed(wide, weight, eps, dtype: tl.constexpr, ROUNDS: tl.constexpr, HIDDEN: tl.constexpr):
    """Return a row divided by its root mean square, times the weight; both in float32.

    If `ROUNDS`, the row is rounded to `dtype` before it is multiplied.
    """
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    if ROUNDS:
        scaled = scaled.to(dtype).to(tl.float32)
    return (scaled * weight).to(dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    await_predecessor(OVERLAPS)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0)
        summed = (wide + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_out_ptr + row * HIDDEN + cols, summed, mask=mask)
        wide = summed.to(tl.float32)
    out = normed(wide, weight, eps, x.dtype, weight_ptr.dtype.element_ty == x.dtype, HIDDEN)
    tl.store(out_ptr + row * HIDDEN + cols, out, mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise `x`, or `x + residual`, by its root mean square.

    Shapes and meaning are those of `pagewire.kernels.RmsNorm`. One program a row.
    """
    tokens, hidden = x.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    residual_out = x if residual is None else torch.empty_like(out)
    if tokens == 0:
        return out, residual_out
    block = next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        residual_out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(max(block // 512, 1), 16),
        **overlap_options(x.device, tokens),
    )
    return out, residual_out
