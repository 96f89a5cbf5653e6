# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`x @ weight.T + bias` with weights in four bits.

Few rows are multiplied with weights that are dequantised in registers. For many, this would be done
again for each tile of rows, so that one launch dequantises the matrix, and `linear` multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import MOST_SPLIT_TILES, next_power_of_2, sm_count
from pagewire.kernels.four_bit_product import Tiling, dequantise, is_aligned, multiply
from pagewire.kernels.four_bits import APART, FourBitWeights
from pagewire.kernels.linear import linear

_MOST_ROWS = 256  # with more, the matrix is dequantised first
_MOST_ROWS_OF_A_TILE = 128
_LEAST_ROWS = 16  # fewest rows of a matrix product
_MAX_SPLIT_K = 8
_BLOCK_OUT = 64
_BLOCK_IN = 128


@triton.jit
def _dequantise_kernel(
    pairs_ptr,  # [outs, half]
    scale_ptr,  # [outs, groups]
    zeros_ptr,  # [outs, groups]; unused with e2m1
    out_ptr,  # [outs, ins] contiguous
    outs,
    ins,
    half,
    groups,
    GROUP: tl.constexpr,
    IS_E2M1: tl.constexpr,
    ALIGNED: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    wanted = row < outs
    first = tl.program_id(1) * BLOCK_IN
    low, high = dequantise(
        pairs_ptr, scale_ptr, zeros_ptr, pairs_ptr, row, wanted, first, ins, half, groups, GROUP,
        IS_E2M1, False, ALIGNED, BLOCK_IN // 2,
    )  # fmt: skip
    byte = tl.arange(0, BLOCK_IN // 2)
    inputs = first + byte // APART * (2 * APART) + byte % APART
    out = out_ptr + row[:, None] * ins + inputs[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(out, low.to(kind), mask=wanted[:, None] & (inputs < ins)[None, :])
    tl.store(out + APART, high.to(kind), mask=wanted[:, None] & (inputs < ins - APART)[None, :])


def dequantised(weights: FourBitWeights, dtype: torch.dtype) -> torch.Tensor:
    """Return what weights stand for, `[out, in]`, rounded once to a dtype."""
    (outs, half), ins = weights.pairs.shape, weights.ins
    out = torch.empty((outs, ins), dtype=dtype, device=weights.pairs.device)
    _dequantise_kernel[(triton.cdiv(outs, _BLOCK_OUT), triton.cdiv(ins, _BLOCK_IN))](
        weights.pairs,
        weights.scale,
        weights.pairs if weights.zeros is None else weights.zeros,
        out,
        outs,
        ins,
        half,
        weights.scale.shape[1],
        GROUP=weights.group,
        IS_E2M1=weights.zeros is None,
        ALIGNED=is_aligned(weights, _BLOCK_IN),
        APART=APART,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=_BLOCK_IN,
        num_warps=4,
    )
    return out


@lru_cache(maxsize=1024)
def choose_tiling(rows: int, outs: int, ins: int, sms: int, element_size: int) -> Tiling:
    """Return the tiling of a product of up to `_MOST_ROWS` rows.

    Args:
        rows: rows of x.
        outs: output features of the weight.
        ins: input features of the weight.
        sms: SMs of the device.
        element_size: bytes of a number of x.
    """
    if element_size == 4:  # no tensor cores: tiles that fit into registers
        return Tiling(32, 1, 2, 4)
    block_out = _BLOCK_OUT if rows <= 64 else 2 * _BLOCK_OUT
    tiles = triton.cdiv(outs, block_out) * triton.cdiv(rows, _MOST_ROWS_OF_A_TILE)
    wanted = sms * (3 if rows <= _LEAST_ROWS else 1.5)
    split_k = 1
    while tiles * split_k < wanted and split_k < _MAX_SPLIT_K and tiles <= MOST_SPLIT_TILES:
        if ins < 4 * split_k * _BLOCK_IN:
            break
        split_k *= 2
    return Tiling(_BLOCK_OUT, split_k, 4, 4) if rows <= 64 else Tiling(block_out, split_k, 3, 8)


def four_bit_linear(
    x: torch.Tensor,
    weights: FourBitWeights,
    out: torch.Tensor | None = None,
    product: Callable[..., torch.Tensor] = linear,
    most_rows: int = _MOST_ROWS,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`; see `pagewire.kernels.FourBitLinear`.

    Args:
        x: see there, as the following ones.
        weights: the weights.
        out: where the result is written.
        product: a projection, as `linear` is, of weights that are dequantised.
        most_rows: with more rows, weights are dequantised first.
        tiling: of few rows; None chooses.
    """
    if not 0 < len(x) <= most_rows:
        return product(x, dequantised(weights, x.dtype), weights.bias, out)
    x = x if x.stride(1) == 1 else x.contiguous()
    outs = len(weights.pairs)
    if out is None:
        out = torch.empty((len(x), outs), dtype=x.dtype, device=x.device)
    chosen = choose_tiling(len(x), outs, weights.ins, sm_count(x.device), x.element_size())
    rows = min(max(next_power_of_2(len(x)), _LEAST_ROWS), _MOST_ROWS_OF_A_TILE)
    return multiply(x, weights, out, rows, tiling or chosen)
