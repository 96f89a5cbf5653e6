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

from pagewire.kernels._launch import LEAST_ROWS, next_power_of_2, sm_count
from pagewire.kernels.four_bit_product import Tiling, dequantise, group_options, multiply
from pagewire.kernels.four_bits import APART, FourBitWeights
from pagewire.kernels.linear import linear

_MOST_ROWS = 128  # with more, the matrix is dequantised first
_BLOCK_OUT, _BLOCK_IN = 64, 128  # that a program dequantises


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
        IS_E2M1=weights.zeros is None,
        APART=APART,
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=_BLOCK_IN,
        num_warps=4,
        **group_options(weights, _BLOCK_IN),
    )
    return out


@lru_cache(maxsize=1024)
def choose_tiling(rows: int, outs: int, ins: int, sms: int, element_size: int) -> Tiling:
    """Return the tiling of a product of up to `_MOST_ROWS` rows, by measurements on an H200.

    Args:
        rows: rows of x.
        outs: output features of the weight.
        ins: input features of the weight.
        sms: SMs of the device.
        element_size: bytes of a number of x.
    """
    if element_size == 4:  # no tensor cores: tiles that fit into registers
        return Tiling(32, 64, 1, 2, 4)
    if rows <= LEAST_ROWS:
        tiling, most_waves = Tiling(64, 256, 1, 3, 4), 4
    elif rows <= 32:
        tiling, most_waves = Tiling(128, 128, 1, 3, 4), 4
    elif rows <= 64:
        tiling, most_waves = Tiling(128, 64, 1, 4, 4), 2
    else:
        tiling, most_waves = Tiling(128, 128, 1, 3, 8), 1
    tiles = triton.cdiv(outs, tiling.block_out)
    most_programs = most_waves * sms
    most_split_k = 8 if 8 * tiles <= sms else 4
    split_k = 1
    while 2 * tiles * split_k <= most_programs and split_k < most_split_k:
        if ins < 4 * split_k * tiling.block_in:  # a range has two tiles at least
            break
        split_k *= 2
    return tiling._replace(split_k=split_k)


def four_bit_linear(
    x: torch.Tensor,
    weights: FourBitWeights,
    out: torch.Tensor | None = None,
    product: Callable[..., torch.Tensor] = linear,
    most_rows: int = _MOST_ROWS,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`; see `pagewire.kernels.FourBitLinear`.

    Args:
        x: see there, as the following ones.
        weights: the weights.
        out: where the result is written.
        product: a projection, as `linear` is, of weights that are dequantised.
        most_rows: with more rows, weights are dequantised first.
    """
    if not 0 < len(x) <= most_rows:
        return product(x, dequantised(weights, x.dtype), weights.bias, out)
    x = x if x.stride(1) == 1 else x.contiguous()
    outs = len(weights.pairs)
    if out is None:
        out = torch.empty((len(x), outs), dtype=x.dtype, device=x.device)
    tiling = choose_tiling(len(x), outs, weights.ins, sm_count(x.device), x.element_size())
    rows = min(max(next_power_of_2(len(x)), LEAST_ROWS), _MOST_ROWS)
    return multiply(x, weights, out, rows, tiling)
