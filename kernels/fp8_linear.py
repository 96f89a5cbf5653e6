# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`x @ weight.T + bias` with weights in FP8, and inputs that are quantised first.

One kernel quantises each token's inputs. The products of FP8 numbers are added in float32 for 128
inputs at a time, since matrix instructions add FP8 less exactly; scales are multiplied afterwards,
with blocks after each 128 inputs. Where rows may have any tiling, another kernel computes few rows,
and cuBLAS what it can of many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import LEAST_ROWS, next_power_of_2
from pagewire.kernels.expert_tiles import TileList
from pagewire.kernels.fp8_few_rows import multiply_few_rows
from pagewire.kernels.fp8_inputs import Quantised, quantise
from pagewire.kernels.fp8_numbers import Fp8Weights
from pagewire.kernels.linear import linear
from pagewire.kernels.reference import fp8_linear as by_torch

_BLOCK_IN = 128
_BLOCK_OUT = 64
_MOST_ROWS = 128
_ALIGNED = 16  # cuBLAS takes sizes that are multiples of it


@triton.jit(do_not_specialize=["rows"])
def _fp8_product_kernel(
    x_ptr,  # [rows, ins] e4m3, contiguous
    x_scale_ptr,  # [rows, groups] float32
    weight_ptr,  # [outs, ins] e4m3, contiguous; with experts, of each
    scale_ptr,  # [scale_rows, groups] float32; with experts, of each
    bias_ptr,  # [outs]; with experts, of each
    out_ptr,  # [rows, outs] contiguous; with experts, by pair
    order_ptr,  # see `TileList`; unused without experts
    tiles_ptr,
    rows,
    outs,
    ins,
    groups,
    scale_rows,
    pairs_of_a_row,  # with experts: pairs of token and expert that share a row of x
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,  # inputs of a block; 0 if there is one scale for all inputs
    HAS_BIAS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row = place < rows
    row = place
    out_row = place
    expert = tl.program_id(1).to(tl.int64) * 0
    if HAS_EXPERTS:
        tile_ptr = tiles_ptr + 3 * tl.program_id(1)
        expert = tl.load(tile_ptr).to(tl.int64)
        if expert < 0:
            return
        place = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_ROWS)
        is_row = place < tl.load(tile_ptr + 2)
        out_row = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)
        row = out_row // pairs_of_a_row
    inputs = tl.arange(0, BLOCK_IN)
    is_column = column < outs
    x_tile = x_ptr + row[:, None] * ins + inputs[None, :]
    weight_tile = weight_ptr + (expert * outs + column[None, :]) * ins + inputs[:, None]
    x_scales = x_scale_ptr + row * groups
    scales = scale_ptr + (expert * scale_rows + column // SCALE_ROWS) * groups
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    for first in range(0, ins, BLOCK_IN):
        there = inputs < ins - first
        x = tl.load(x_tile + first, mask=is_row[:, None] & there[None, :], other=0.0)
        weight = tl.load(weight_tile + first, mask=is_column[None, :] & there[:, None], other=0.0)
        product = tl.dot(x, weight, out_dtype=tl.float32)
        if SCALE_COLUMNS > 0:
            group = first // SCALE_COLUMNS
            x_scale = tl.load(x_scales + group, mask=is_row, other=0.0)
            scale = tl.load(scales + group, mask=is_column, other=0.0)
            product = product * x_scale[:, None] * scale[None, :]
        acc += product
    if SCALE_COLUMNS == 0:
        x_scale = tl.load(x_scales, mask=is_row, other=0.0)
        acc = acc * x_scale[:, None] * tl.load(scales, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * outs + column, mask=is_column, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    out = out_ptr + out_row[:, None] * outs + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@lru_cache(maxsize=16)
def multiplies_fp8(device: torch.device) -> bool:
    """Return whether a device has matrix instructions for e4m3; Triton's interpreter does."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def multiply(
    inputs: Quantised,
    weights: Fp8Weights,
    out: torch.Tensor,
    tile_rows: int,
    tiles: TileList | None = None,
    pairs_of_a_row: int = 1,
) -> None:
    """Write `x @ weight.T + bias`, for rows or for pairs of a row and an expert.

    Args:
        inputs: x.
        weights: of a projection, or of all experts.
        out: `[rows, out]` contiguous; with experts `[pairs, out]`.
        tile_rows: rows of a program.
        tiles: pairs by expert, if there are experts.
        pairs_of_a_row: of a row of x.
    """
    (rows, groups), (outs, ins) = inputs.scale.shape, weights.numbers.shape[-2:]
    of_rows = triton.cdiv(rows, tile_rows) if tiles is None else tiles.tiles.shape[0]
    block_in = _BLOCK_IN if groups == 1 else min(_BLOCK_IN, weights.block[1])
    _fp8_product_kernel[(triton.cdiv(outs, _BLOCK_OUT), of_rows)](
        inputs.numbers,
        inputs.scale,
        weights.numbers,
        weights.scale,
        weights.numbers if weights.bias is None else weights.bias,
        out,
        out if tiles is None else tiles.order,
        out if tiles is None else tiles.tiles,
        rows,
        outs,
        ins,
        groups,
        weights.scale.shape[-2],
        pairs_of_a_row,
        SCALE_ROWS=weights.block[0],
        SCALE_COLUMNS=weights.block[1] if groups > 1 else 0,
        HAS_BIAS=weights.bias is not None,
        HAS_EXPERTS=tiles is not None,
        BLOCK_ROWS=tile_rows,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=block_in,
        num_warps=8 if tile_rows == _MOST_ROWS else 4,
    )


def fp8_linear(
    x: torch.Tensor,
    weights: Fp8Weights,
    quantises_inputs: bool = True,
    out: torch.Tensor | None = None,
    product: Callable[..., torch.Tensor] = linear,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`; see `pagewire.kernels.Fp8Linear`.

    Args:
        x: see there, as the following ones.
        weights: the weights.
        quantises_inputs: whether inputs are quantised.
        out: where the result is written.
        product: a projection, as `linear` is, where numbers are not multiplied in FP8.
        tile_rows: rows of a program; None chooses by the number of rows, and lets cuBLAS compute
            what it can.
    """
    if not quantises_inputs:
        return product(x, by_torch.dequantised(weights).to(x.dtype), weights.bias, out)
    if not multiplies_fp8(x.device):
        return by_torch.fp8_linear(x, weights, out=out, product=product)
    inputs = quantise(x, weights.block[1], weights.input_scale)
    if tile_rows is None and len(x):
        y = multiply_few_rows(inputs, weights, x.dtype, out)
        if y is not None:
            return y
        if _can_scale(x, weights):
            y = torch._scaled_mm(
                inputs.numbers,
                weights.numbers.t(),
                scale_a=inputs.scale,
                scale_b=weights.scale.t(),
                bias=weights.bias,
                out_dtype=x.dtype,
            )
            return y if out is None else out.copy_(y)
    if out is None:
        out = torch.empty((len(x), len(weights.numbers)), dtype=x.dtype, device=x.device)
    if len(x):
        by_rows = min(max(next_power_of_2(len(x)), LEAST_ROWS), _MOST_ROWS)
        multiply(inputs, weights, out, tile_rows or by_rows)
    return out


def _can_scale(x: torch.Tensor, weights: Fp8Weights) -> bool:
    """Return whether cuBLAS can compute a product of rows that have one scale each."""
    outs, ins = weights.numbers.shape
    return (
        x.device.type == "cuda"
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and weights.scale.shape == (outs, 1)
        and outs % _ALIGNED == ins % _ALIGNED == 0
    )
