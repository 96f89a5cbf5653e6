# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A mixture of experts with weights in four bits, which are dequantised in registers.

Two grouped products and a weighted sum, as in `experts.py`. A weight is dequantised in float32 and
rounded to x's dtype, so that products are those of the dequantised weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.expert_sizes import rows_of_a_tile
from pagewire.kernels.expert_tiles import TileList, list_tiles
from pagewire.kernels.experts import sum_choices
from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.gated_silu import SILU, GatedSilu

_BLOCK_IN = 32
_MOST_ROWS = 64  # for which there are registers
_MANTISSA_BITS = tl.constexpr(23)  # of float32
_BITS_OF_LEAST_POWER = tl.constexpr(1 << 22)  # of 2 ** -127 in float32, where its exponent is 0


@triton.jit
def _dequantise(
    pairs_ptr,  # [rows, half]
    scale_ptr,  # [rows, groups]
    zeros_ptr,  # [rows, groups]; unused with e2m1
    group_of_ptr,  # [ins] of these rows; unused without an order
    row,  # [OUT] int64
    inputs,  # [IN]
    mask,  # [OUT, IN]
    half,
    groups,
    GROUP: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Return what some weights stand for, [OUT, IN] float32; 0 where masked."""
    pair = tl.load(pairs_ptr + row[:, None] * half + (inputs // 2)[None, :], mask=mask, other=0)
    number = (pair.to(tl.int32) >> (inputs % 2 * 4)[None, :]) & 15
    group = (inputs // GROUP)[None, :]
    if HAS_ORDER:
        group = tl.load(group_of_ptr + inputs[None, :] + 0 * row[:, None], mask=mask, other=0)
    place = row[:, None] * groups + group
    scale = tl.load(scale_ptr + place, mask=mask, other=0)
    if IS_E2M1:
        size = number & 7
        # From 1 on: a mantissa of 1 or 1.5, times a power of two.
        large = (2 + (size & 1)) * (1 << (size >> 1))
        value = tl.where(size < 2, 2 * size, large).to(tl.float32) * 0.25
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent == 0, _BITS_OF_LEAST_POWER, exponent << _MANTISSA_BITS)
        return tl.where(number < 8, value, -value) * bits.to(tl.float32, bitcast=True)
    zero = tl.load(zeros_ptr + place, mask=mask, other=0).to(tl.int32)
    return (number - zero).to(tl.float32) * scale


@triton.jit
def _four_bit_product_kernel(
    x_ptr,  # [tokens, ins], or, not gated, [pairs, ins] by their place in `order`
    pairs_ptr,  # [experts, outs, half]
    scale_ptr,  # [experts, outs, groups]
    zeros_ptr,  # likewise
    group_of_ptr,  # [experts, 2 if gated else 1, ins]
    bias_ptr,  # [experts, outs]
    out_ptr,  # gated, [pairs, outs / 2] by their place in `order`; else [pairs, outs] by pair
    order_ptr,
    tiles_ptr,
    ins,
    outs,
    groups,
    top_k,
    x_stride,
    GROUP: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # whether a gate's up is the next row
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    tile_ptr = tiles_ptr + 3 * tl.program_id(1)
    expert = tl.load(tile_ptr).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_ptr + 1) + tl.arange(0, ROWS)
    seen = place < tl.load(tile_ptr + 2)
    pair = tl.load(order_ptr + place, mask=seen, other=0)
    width = outs // 2 if GATED else outs
    source = pair // top_k if GATED else place
    target = place if GATED else pair
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    wanted = column < width
    row = expert * outs + (column * 2 if INTERLEAVED else column)
    up_row = row + (1 if INTERLEAVED else width)
    half = (ins + 1) // 2
    group_of = group_of_ptr + expert * (2 if GATED else 1) * ins
    acc = tl.zeros([BLOCK_OUT, ROWS], dtype=tl.float32)
    up = tl.zeros([BLOCK_OUT, ROWS], dtype=tl.float32)
    for first in range(0, ins, BLOCK_IN):
        inputs = first + tl.arange(0, BLOCK_IN)
        there = inputs < ins
        x_tile = x_ptr + source.to(tl.int64)[None, :] * x_stride + inputs[:, None]
        x = tl.load(x_tile, mask=there[:, None] & seen[None, :], other=0.0)
        mask = wanted[:, None] & there[None, :]
        weight = _dequantise(
            pairs_ptr, scale_ptr, zeros_ptr, group_of, row, inputs, mask, half, groups,
            GROUP, IS_E2M1, HAS_ORDER,
        )  # fmt: skip
        acc = tl.dot(weight.to(x.dtype), x, acc, input_precision="ieee")
        if GATED:
            weight = _dequantise(
                pairs_ptr, scale_ptr, zeros_ptr, group_of + ins, up_row, inputs, mask, half, groups,
                GROUP, IS_E2M1, HAS_ORDER,
            )  # fmt: skip
            up = tl.dot(weight.to(x.dtype), x, up, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row, mask=wanted, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_ptr + up_row, mask=wanted, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_LIMIT:
            acc = tl.minimum(acc, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        acc = acc / (1.0 + tl.exp(-ALPHA * acc)) * (up + UP_OFFSET)
    out = out_ptr + target.to(tl.int64)[None, :] * width + column[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=wanted[:, None] & seen[None, :])


def four_bit_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: FourBitWeights,
    down: FourBitWeights,
    activation: GatedSilu = SILU,
    interleaved: bool = False,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

    Shapes are those of `pagewire.kernels.FourBitExperts`. `tile_rows` is how many pairs a tile has;
    None chooses by the batch.

    Raises:
        UnsupportedShapeError: the last dimension of x has gaps.
    """
    if x.stride(1) != 1:
        raise UnsupportedShapeError("experts need rows of stride 1")
    if not len(x):
        return torch.empty_like(x)
    count, top_k = len(gate_up.pairs), chosen.shape[1]
    rows = tile_rows or min(rows_of_a_tile(chosen.numel(), count), _MOST_ROWS)
    tiles = list_tiles(chosen, count, rows)
    inner = _project(x, gate_up, tiles, top_k, activation, interleaved)
    return sum_choices(_project(inner, down, tiles, top_k), weights, x)


def _project(
    x: torch.Tensor,
    weights: FourBitWeights,
    tiles: TileList,
    top_k: int,
    activation: GatedSilu | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return the gated first projections of tokens, or the second ones of pairs.

    Args:
        x: `[T, in]`, or `[pairs, in]` in the order of the tiles.
        weights: of all experts.
        tiles: pairs by expert.
        top_k: experts of a token.
        activation: of the first projections, which are `[pairs, out / 2]` in the order of the
            tiles; None: these are the second ones, `[pairs, out]` in the order of pairs.
        interleaved: whether rows of gate and up alternate.
    """
    outs, gate = weights.pairs.shape[1], activation or SILU
    width = outs if activation is None else outs // 2
    out = torch.empty((len(tiles.order), width), dtype=x.dtype, device=x.device)
    block = 32 if x.dtype == torch.float32 else 64
    _four_bit_product_kernel[(triton.cdiv(width, block), len(tiles.tiles))](
        x,
        weights.pairs,
        weights.scale,
        weights.pairs if weights.zeros is None else weights.zeros,
        weights.pairs if weights.group_of is None else weights.group_of,
        weights.pairs if weights.bias is None else weights.bias,
        out,
        tiles.order,
        tiles.tiles,
        weights.ins,
        outs,
        weights.scale.shape[2],
        top_k,
        x.stride(0),
        GROUP=weights.group,
        IS_E2M1=weights.zeros is None,
        HAS_ORDER=weights.group_of is not None,
        HAS_BIAS=weights.bias is not None,
        GATED=activation is not None,
        INTERLEAVED=interleaved,
        ALPHA=gate.alpha,
        UP_OFFSET=gate.up_offset,
        HAS_LIMIT=gate.limit is not None,
        LIMIT=gate.limit or 0.0,
        ROWS=tiles.rows,
        BLOCK_OUT=block,
        BLOCK_IN=_BLOCK_IN,
        num_warps=8,  # with fewer, what is dequantised does not fit into registers
    )
    return out
