# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Products with weights in four bits, which are dequantised in registers: dense, or of experts.

A byte is loaded once and has two numbers whose inputs are 16 apart, so that a tile is two products,
each with inputs that are neighbours. A weight is dequantised in float32 and rounded to x's dtype,
so that products are those of the dequantised weights. With few rows, dense products split the
inputs as `linear.py` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, overlap_options
from pagewire.kernels._splits import add_splits, finish_split, split_counters
from pagewire.kernels.expert_tiles import TileList
from pagewire.kernels.four_bits import APART, FourBitWeights
from pagewire.kernels.gated_silu import SILU, GatedSilu

_APART = tl.constexpr(APART)
_MANTISSA_BITS = tl.constexpr(23)  # of float32
_BITS_OF_LEAST_POWER = tl.constexpr(1 << 22)  # of 2 ** -127 in float32, where its exponent is 0
_INTEGERS = tl.constexpr(0x4B000000)  # of 2 ** 23 in float32; the lowest bits count ones
_FIRST_INTEGER = tl.constexpr(float(1 << 23))
_E2M1_BITS = tl.constexpr(-0x7E400000)  # 0x81C00000: where e2m1 is in float32, but for a power
_E2M1_SHIFTS = tl.constexpr((1 << 28) + (1 << 22))  # puts the sign, and the rest, there
_E2M1_POWER = tl.constexpr(float(2**126))


@triton.jit
def _meant(number, zero, scale, IS_E2M1: tl.constexpr):
    """Return in float32 what int32 numbers from 0 to 15 stand for."""
    if IS_E2M1:
        bits = (number * _E2M1_SHIFTS) & _E2M1_BITS
        return bits.to(tl.float32, bitcast=True) * _E2M1_POWER * scale
    return ((number | _INTEGERS).to(tl.float32, bitcast=True) - zero) * scale


@triton.jit
def _per_byte(values, BYTES: tl.constexpr):
    """Repeat values of groups `[OUT, GROUPS]` for each byte of a tile: `[OUT, BYTES]`."""
    if values.shape[1] == 1:
        return tl.broadcast_to(values, [values.shape[0], BYTES])
    shape: tl.constexpr = [values.shape[0], values.shape[1], BYTES // values.shape[1]]
    return tl.broadcast_to(values[:, :, None], shape).reshape([values.shape[0], BYTES])


@triton.jit
def _load_scales(scale_ptr, zeros_ptr, place, mask, IS_E2M1: tl.constexpr):
    """Return scales, and zeros as `_meant` subtracts them, in float32."""
    scale = tl.load(scale_ptr + place, mask=mask, other=0)
    if IS_E2M1:
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent == 0, _BITS_OF_LEAST_POWER, exponent << _MANTISSA_BITS)
        scale = bits.to(tl.float32, bitcast=True)
        return scale, scale
    return scale, tl.load(zeros_ptr + place, mask=mask, other=0) + _FIRST_INTEGER


@triton.jit
def dequantise(
    pairs_ptr,  # [rows, half]
    scale_ptr,  # [rows, groups]
    zeros_ptr,  # likewise; unused with e2m1
    group_of_ptr,  # [ins] for each row; unused without an order
    row,  # [OUT] int64
    wanted,  # [OUT]
    first,  # first input of the tile
    ins,
    half,
    groups,
    GROUP: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return what the lower and upper numbers of a tile's bytes stand for, [OUT, BYTES]."""
    byte = tl.arange(0, BYTES)
    mask = wanted[:, None] & (byte < half - first // 2)[None, :]
    pairs = pairs_ptr + row[:, None] * half + (first // 2 + byte)[None, :]
    both = tl.load(pairs, mask=mask, other=0, eviction_policy="evict_first").to(tl.int32)
    start = row[:, None] * groups
    if ALIGNED:
        if GROUP >= 2 * BYTES:
            place = row * groups + first // GROUP
            scale, zero = _load_scales(scale_ptr, zeros_ptr, place, wanted, IS_E2M1)
            scale, zero = scale[:, None], zero[:, None]
        else:
            group = first // GROUP + tl.arange(0, 2 * BYTES // GROUP)[None, :]
            mask = wanted[:, None] & (group < groups)
            scale, zero = _load_scales(scale_ptr, zeros_ptr, start + group, mask, IS_E2M1)
        low_scale, low_zero = _per_byte(scale, BYTES), _per_byte(zero, BYTES)
        high_scale, high_zero = low_scale, low_zero
    else:
        inputs = (first + byte // _APART * (2 * _APART) + byte % _APART)[None, :]
        low_group = tl.minimum(inputs // GROUP, groups - 1)
        high_group = tl.minimum((inputs + _APART) // GROUP, groups - 1)
        if HAS_ORDER:
            order = group_of_ptr[:, None] + inputs
            low_group = tl.load(order, mask=mask & (inputs < ins), other=0)
            high_group = tl.load(order + _APART, mask=mask & (inputs < ins - _APART), other=0)
        place = start + low_group
        low_scale, low_zero = _load_scales(scale_ptr, zeros_ptr, place, mask, IS_E2M1)
        place = start + high_group
        high_scale, high_zero = _load_scales(scale_ptr, zeros_ptr, place, mask, IS_E2M1)
    low = _meant(both & 15, low_zero, low_scale, IS_E2M1)
    return low, _meant(both >> 4, high_zero, high_scale, IS_E2M1)


@triton.jit(do_not_specialize=["rows"])
def _four_bit_product_kernel(
    x_ptr,  # [rows, ins], or, not gated, [pairs, ins] by their place in `order`
    pairs_ptr,  # [outs, half]; with experts, of each
    scale_ptr,  # [outs, groups]; with experts, of each
    zeros_ptr,  # likewise
    group_of_ptr,  # [2 if gated else 1, ins] of each expert
    bias_ptr,  # [outs]; with experts, of each
    out_ptr,  # [rows, outs]; gated, [pairs, outs / 2] by their place in `order`; [pairs, outs]
    partial_ptr,  # [SPLIT_K, rows, outs] float32
    counters_ptr,  # int32: splits of a tile that are done; 0 before and after each launch
    order_ptr,  # see `TileList`; unused without experts
    tiles_ptr,
    rows,
    ins,
    outs,
    half,
    groups,
    top_k,
    x_stride,
    GROUP: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether tiles are parts of a group, or whole groups
    HAS_BIAS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # whether a gate's up is the next row
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,  # rows of the weight; gated, half of them gates
    BLOCK_IN: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_predecessor(OVERLAPS)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    seen = place < rows
    source = place
    target = place
    expert = tl.program_id(1).to(tl.int64) * 0
    if HAS_EXPERTS:
        tile_ptr = tiles_ptr + 3 * tl.program_id(1)
        expert = tl.load(tile_ptr).to(tl.int64)
        if expert < 0:
            return
        place = tl.load(tile_ptr + 1) + tl.arange(0, ROWS)
        seen = place < tl.load(tile_ptr + 2)
        pair = tl.load(order_ptr + place, mask=seen, other=0)
        source = pair // top_k if GATED else place
        target = place if GATED else pair
    PARTS: tl.constexpr = 2 if GATED else 1
    COLUMNS: tl.constexpr = BLOCK_OUT // PARTS
    width = outs // PARTS
    index = tl.arange(0, BLOCK_OUT)
    part = index % PARTS if INTERLEAVED else index // COLUMNS
    column = tl.program_id(0) * COLUMNS + (index // PARTS if INTERLEAVED else index % COLUMNS)
    row = column * PARTS + part if INTERLEAVED else part * width + column
    wanted = column < width
    group_of = group_of_ptr + (expert * PARTS + part) * ins
    pairs_ptr += expert * outs * half
    scale_ptr += expert * outs * groups
    zeros_ptr += expert * outs * groups
    byte = tl.arange(0, BLOCK_IN // 2)
    inputs = byte // _APART * (2 * _APART) + byte % _APART
    x_tile = x_ptr + source.to(tl.int64)[None, :] * x_stride + inputs[:, None]
    acc = tl.zeros([BLOCK_OUT, ROWS], dtype=tl.float32)
    split = tl.program_id(2)
    span = tl.cdiv(tl.cdiv(ins, BLOCK_IN), SPLIT_K) * BLOCK_IN
    end = tl.minimum(ins, (split + 1) * span)
    for first in tl.range(split * span, end, BLOCK_IN, num_stages=STAGES):
        there = inputs < ins - first
        x_low = tl.load(x_tile + first, mask=there[:, None] & seen[None, :], other=0.0)
        there = inputs < ins - _APART - first
        x_high = tl.load(x_tile + _APART + first, mask=there[:, None] & seen[None, :], other=0.0)
        low, high = dequantise(
            pairs_ptr, scale_ptr, zeros_ptr, group_of, row.to(tl.int64), wanted, first, ins, half,
            groups, GROUP, IS_E2M1, HAS_ORDER, ALIGNED, BLOCK_IN // 2,
        )  # fmt: skip
        acc = tl.dot(low.to(x_low.dtype), x_low, acc, input_precision="ieee")
        acc = tl.dot(high.to(x_low.dtype), x_high, acc, input_precision="ieee")
    mask = wanted[:, None] & seen[None, :]
    if SPLIT_K > 1:
        size = rows.to(tl.int64) * outs
        sums = partial_ptr + target.to(tl.int64)[None, :] * outs + row[:, None]
        counter = counters_ptr + tl.program_id(0)  # there is one tile of rows
        if not finish_split(acc, sums, size, mask, counter, split, SPLIT_K):
            return
        acc = add_splits(sums, size, mask, counter, SPLIT_K)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * outs + row, mask=wanted, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    if GATED:
        if INTERLEAVED:
            gate, up = acc.reshape([COLUMNS, 2, ROWS]).permute(0, 2, 1).split()
        else:
            gate, up = acc.reshape([2, COLUMNS, ROWS]).permute(1, 2, 0).split()
        if HAS_LIMIT:
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        acc = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + UP_OFFSET)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (column < width)[:, None] & seen[None, :]
    out = out_ptr + target.to(tl.int64)[None, :] * width + column[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


class Tiling(NamedTuple):
    """Tiling of a product: outputs and inputs of a tile, ranges of inputs, tiles in flight, warps.

    Outputs are rows of the weight; gate and up are two.
    """

    block_out: int
    block_in: int
    split_k: int
    stages: int
    warps: int


def multiply(
    x: torch.Tensor,
    weights: FourBitWeights,
    out: torch.Tensor,
    rows: int,
    tiling: Tiling,
    tiles: TileList | None = None,
    top_k: int = 1,
    activation: GatedSilu | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Write `x @ weight.T + bias`, for rows or for pairs of a row and an expert; return it.

    Args:
        x: `[T, in]`, or `[pairs, in]` in the order of the tiles; the last dimension has no gaps.
        weights: of a projection, or of all experts.
        out: `[T, out]`; with experts `[pairs, out]` in the order of pairs, or, with an activation,
            `[pairs, out / 2]` in the order of the tiles; contiguous.
        rows: of a program's tile: a power of two from 16.
        tiling: see there.
        tiles: pairs by expert, if there are experts.
        top_k: experts of a token.
        activation: of an expert's first projections; None: no gate.
        interleaved: whether rows of gate and up alternate.
    """
    if not group_options(weights, tiling.block_in)["ALIGNED"]:  # more scales, in registers
        tiling = tiling._replace(block_in=2 * APART, stages=2)
    (outs, half), groups = weights.pairs.shape[-2:], weights.scale.shape[-1]
    of_rows = triton.cdiv(len(x), rows) if tiles is None else len(tiles.tiles)
    tokens = len(x) if tiles is None or activation else len(x) // top_k
    optional = (weights.zeros, weights.group_of, weights.bias)
    partial = out
    if tiling.split_k > 1:
        size = (tiling.split_k, len(x), outs)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    _four_bit_product_kernel[(triton.cdiv(outs, tiling.block_out), of_rows, tiling.split_k)](
        x,
        weights.pairs,
        weights.scale,
        *(weights.pairs if each is None else each for each in optional),
        out,
        partial,
        split_counters(x.device),
        *((out, out) if tiles is None else tiles[:2]),
        *(len(x), weights.ins, outs, half, groups, top_k, x.stride(0)),
        IS_E2M1=weights.zeros is None,
        HAS_ORDER=weights.group_of is not None,
        HAS_BIAS=weights.bias is not None,
        HAS_EXPERTS=tiles is not None,
        ROWS=rows,
        BLOCK_OUT=tiling.block_out,
        BLOCK_IN=tiling.block_in,
        SPLIT_K=tiling.split_k,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **group_options(weights, tiling.block_in),
        **_gate_options(activation, interleaved),
        **overlap_options(x.device, tokens),
    )
    return out


def _gate_options(activation: GatedSilu | None, interleaved: bool) -> dict[str, Any]:
    """Return how a kernel gates its sums, if it does."""
    gate = activation or SILU
    return {
        "GATED": activation is not None,
        "INTERLEAVED": interleaved,
        "ALPHA": gate.alpha,
        "UP_OFFSET": gate.up_offset,
        "HAS_LIMIT": gate.limit is not None,
        "LIMIT": gate.limit or 0.0,
    }


def group_options(weights: FourBitWeights, block_in: int) -> dict[str, Any]:
    """Return how a kernel with tiles of `block_in` inputs finds scales.

    It is ALIGNED if a tile is part of a group, or whole groups of a power of two.
    """
    group = weights.group
    if group >= weights.ins:  # one for all inputs, and for those that are masked
        group += -group % block_in
    is_aligned = group % block_in == 0 or (group >= 2 * APART and block_in % group == 0)
    return {"GROUP": group, "ALIGNED": is_aligned and weights.group_of is None}
