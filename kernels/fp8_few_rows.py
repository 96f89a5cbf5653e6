# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`x @ weight.T + bias` in FP8 of few rows, as in a decode step.

Reading the weights takes the time. Programs and splits are as in `linear.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import (
    LEAST_ROWS,
    await_predecessor,
    next_power_of_2,
    overlap_options,
    sm_count,
)
from pagewire.kernels._splits import add_splits, finish_split, split_counters
from pagewire.kernels.fp8_inputs import MOST_OVERLAPPING_ROWS, Quantised
from pagewire.kernels.fp8_numbers import Fp8Weights

_MOST_ROWS = 64
_BLOCK_OUT = 64
_BLOCK_IN = 128  # inputs whose products a matrix instruction may add
_MAX_SPLIT_K = 4
_STAGES = 6


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x_ptr,  # [rows, ins] e4m3, contiguous
    x_scale_ptr,  # [rows, groups] float32
    weight_ptr,  # [outs, ins] e4m3, contiguous
    scale_ptr,  # [scale_rows, groups] float32
    bias_ptr,  # [outs]
    out_ptr,  # [rows, outs] contiguous
    partial_ptr,  # [split_k, rows, outs] float32
    counters_ptr,  # [tiles] int32: splits that are done; 0 before and after each launch
    rows,
    outs,
    ins,
    groups,
    SCALE_ROWS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,  # whether inputs have several scales
    STEP: tl.constexpr,  # inputs that have one
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    columns = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, BLOCK_ROWS)
    start = split * (ins // SPLIT_K)
    end = start + ins // SPLIT_K
    inputs = tl.arange(0, BLOCK_IN)
    seen = row[None, :] < rows
    weight_tile = weight_ptr + columns.to(tl.int64)[:, None] * ins + inputs[None, :]
    x_tile = x_ptr + row[None, :] * ins + inputs[:, None]
    scales = scale_ptr + (columns // SCALE_ROWS)[:, None] * groups
    x_scales = x_scale_ptr + row[None, :] * groups
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    if OVERLAPS:  # no kernel writes weights: load the first ones while others still run
        early = tl.load(weight_tile + start, eviction_policy="evict_first")
        await_predecessor(OVERLAPS)
    scale = tl.load(scales + start // STEP)
    x_scale = tl.load(x_scales + start // STEP, mask=seen, other=0.0)
    if OVERLAPS:
        product = tl.dot(early, tl.load(x_tile + start, mask=seen, other=0.0))
        acc = product * scale * x_scale if HAS_BLOCKS else product
        start += BLOCK_IN
        if HAS_BLOCKS:
            group = tl.minimum(start // STEP, groups - 1)
            scale = tl.load(scales + group)
            x_scale = tl.load(x_scales + group, mask=seen, other=0.0)
    for first in tl.range(start, end, BLOCK_IN, num_stages=STAGES):
        weight = tl.load(weight_tile + first, eviction_policy="evict_first")
        x = tl.load(x_tile + first, mask=seen, other=0.0)
        if HAS_BLOCKS:  # of the next inputs, so that nothing waits for them
            group = tl.minimum((first + BLOCK_IN) // STEP, groups - 1)
            next_scale = tl.load(scales + group)
            next_x_scale = tl.load(x_scales + group, mask=seen, other=0.0)
            acc += tl.dot(weight, x) * scale * x_scale
            scale, x_scale = next_scale, next_x_scale
        else:
            acc += tl.dot(weight, x)
    offsets = row[None, :] * outs + columns[:, None]
    is_last = True
    if SPLIT_K > 1:
        sums, size, counter = partial_ptr + offsets, rows * outs, counters_ptr + tile
        stored = tl.broadcast_to(seen, acc.shape)
        is_last = finish_split(acc, sums, size, stored, counter, split, SPLIT_K)
        if is_last:
            acc = add_splits(sums, size, stored, counter, SPLIT_K)
    if is_last:
        if not HAS_BLOCKS:
            acc = acc * scale * x_scale
        if HAS_BIAS:
            acc += tl.load(bias_ptr + columns).to(tl.float32)[:, None]
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=seen)


@lru_cache(maxsize=1024)
def choose_split(rows: int, outs: int, ins: int, sms: int) -> int | None:
    """Return into how many ranges the inputs are split; None if this kernel does not suit a shape.

    Measured on an H200: as many as leave each program an SM, or two above 16 rows.

    Args:
        rows: rows of x.
        outs: output features of the weight.
        ins: input features of the weight.
        sms: SMs of the device.
    """
    if not 0 < rows <= _MOST_ROWS or outs % _BLOCK_OUT or ins % _BLOCK_IN:
        return None
    fewest = 2 if rows <= LEAST_ROWS else 4  # more rows are costly to add
    split_k = 1
    while (
        fewest * split_k * outs // _BLOCK_OUT <= sms
        and split_k < _MAX_SPLIT_K
        and ins % (2 * split_k * _BLOCK_IN) == 0
    ):
        split_k *= 2
    return split_k


def multiply_few_rows(
    inputs: Quantised, weights: Fp8Weights, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor | None:
    """Return `x @ weight.T + bias`, or None if this kernel does not suit the shape.

    Args:
        inputs: x.
        weights: of a projection.
        dtype: of the result.
        out: where the result is written, contiguous.
    """
    (rows, groups), (outs, ins) = inputs.scale.shape, weights.numbers.shape
    device = weights.numbers.device
    split_k = choose_split(rows, outs, ins, sm_count(device))
    if split_k is None or (groups > 1 and weights.block[1] % _BLOCK_IN):
        return None
    if out is None:
        out = torch.empty((rows, outs), dtype=dtype, device=device)
    partial, most_overlapping = inputs.scale, MOST_OVERLAPPING_ROWS
    if split_k > 1:  # more programs: with more rows they would delay the quantising
        most_overlapping = 4
        partial = torch.empty((split_k, rows, outs), dtype=torch.float32, device=device)
    _few_rows_kernel[(outs // _BLOCK_OUT, split_k)](
        inputs.numbers,
        inputs.scale,
        weights.numbers,
        weights.scale,
        weights.numbers if weights.bias is None else weights.bias,
        out,
        partial,
        split_counters(device),
        rows,
        outs,
        ins,
        groups,
        SCALE_ROWS=weights.block[0],
        HAS_BLOCKS=groups > 1,
        STEP=weights.block[1],
        BLOCK_ROWS=max(next_power_of_2(rows), LEAST_ROWS),
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=_BLOCK_IN,
        SPLIT_K=split_k,
        STAGES=_STAGES,
        HAS_BIAS=weights.bias is not None,
        num_warps=4,
        **overlap_options(device, rows, most_overlapping),
    )
    return out
