# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Matrix products with one tiling per weight: a row's result does not depend on other rows.

A program takes some rows, some outputs, and all inputs in order. The tiling depends on the weight's
shape. With few rows, most of a tile is empty; this costs little, since most time is spent reading
the weights.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels import experts as usual_experts
from pagewire.kernels import four_bit_experts as usual_four_bit_experts
from pagewire.kernels import four_bit_linear as usual_four_bit_linear
from pagewire.kernels import fp8_experts as usual_fp8_experts
from pagewire.kernels import fp8_linear as usual_fp8_linear

# An expert's weights are read once for 64 rows of a long prompt.
_TILE_ROWS = 64
experts = partial(usual_experts.experts, tile_rows=_TILE_ROWS)
fp8_experts = partial(usual_fp8_experts.fp8_experts, mixture=experts, tile_rows=_TILE_ROWS)
four_bit_experts = partial(usual_four_bit_experts.four_bit_experts, tile_rows=_TILE_ROWS)

_MANY_OUTS = 16384  # fill a GPU's SMs with large tiles


class _Tiling(NamedTuple):
    """Rows, outputs and inputs of a tile, warps, and tiles in flight."""

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int


def _tiling_of(outs: int, element_size: int) -> _Tiling:
    """Return the tiling of the product with a weight; it must not depend on the rows."""
    if element_size == 4:
        return _Tiling(32, 32, 32, 4, 2)
    return _Tiling(128, 128, 64, 8, 3) if outs >= _MANY_OUTS else _Tiling(128, 64, 64, 8, 4)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr,  # [rows, heads, ins]
    weight_ptr,  # [heads, outs, ins]
    bias_ptr,  # [outs]
    out_ptr,  # [rows, heads, outs]
    rows,
    outs,
    ins,
    x_stride_row,
    x_stride_head,
    weight_stride_head,
    weight_stride_out,
    weight_stride_in,
    out_stride_row,
    out_stride_head,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    # Programs that share weights are neighbours.
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    head = tl.program_id(2).to(tl.int64)
    inputs = tl.arange(0, BLOCK_IN)
    is_row, is_column = row < rows, column < outs
    x_tile = x_ptr + head * x_stride_head + row[:, None] * x_stride_row + inputs[None, :]
    weight_tile = weight_ptr + head * weight_stride_head + column[None, :] * weight_stride_out
    weight_tile += inputs[:, None] * weight_stride_in
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    for first in tl.range(0, ins, BLOCK_IN, num_stages=STAGES):
        there = inputs < ins - first
        x = tl.load(x_tile + first, mask=is_row[:, None] & there[None, :], other=0.0)
        weight = tl.load(
            weight_tile + first * weight_stride_in,
            mask=is_column[None, :] & there[:, None],
            other=0.0,
        )
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + head * out_stride_head + row[:, None] * out_stride_row + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def _multiply(
    x: torch.Tensor,  # [T, H, in]
    weight: torch.Tensor,  # [H, out, in], any strides
    bias: torch.Tensor | None,  # [out]
    out: torch.Tensor,  # [T, H, out]
) -> None:
    rows, heads, ins = x.shape
    outs = weight.shape[1]
    if rows == 0:
        return
    x = x if x.stride(2) == 1 else x.contiguous()
    tiling = _tiling_of(outs, x.element_size())
    _product_kernel[(triton.cdiv(rows, tiling.rows), triton.cdiv(outs, tiling.outs), heads)](
        x,
        weight,
        weight if bias is None else bias.contiguous(),
        out,
        rows,
        outs,
        ins,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outs,
        BLOCK_IN=tiling.ins,
        STAGES=tiling.stages,
        HAS_BIAS=bias is not None,
        num_warps=tiling.warps,
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`; see `pagewire.kernels.Linear`."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _multiply(x.unsqueeze(1), weight.unsqueeze(0), bias, out.unsqueeze(1))
    return out


fp8_linear = partial(usual_fp8_linear.fp8_linear, product=linear, tile_rows=_TILE_ROWS)
four_bit_linear = partial(usual_four_bit_linear.four_bit_linear, product=linear, most_rows=0)


def head_products(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each head's rows times the head's matrix; see `pagewire.kernels.HeadProducts`."""
    tokens, heads, _ = x.shape
    out = torch.empty((tokens, heads, weights.shape[2]), dtype=x.dtype, device=x.device)
    _multiply(x, weights.transpose(1, 2), None, out)
    return out
