# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""`x @ weight.T + bias` of few rows, as in a decode step: reading the weights takes the time.

Each program computes some output features. If that would leave SMs idle, the inputs are also split
into `SPLIT_K` ranges: the program that finishes last adds their sums, always in the same order, so
that results do not depend on which one it is. cuBLAS computes many rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
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

MOST_ROWS = 32  # cuBLAS is faster with more
_BLOCK_OUT = 64
_BLOCK_IN = 128
_STAGES = 4
_MAX_SPLIT_K = 4


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,  # [rows, ins]
    weight_ptr,  # [outs, ins] contiguous
    bias_ptr,  # [outs]
    out_ptr,  # [rows, outs] contiguous
    partial_ptr,  # [split_k, rows, outs] float32
    counters_ptr,  # [tiles] int32: splits that are done; 0 before and after each launch
    rows,
    outs,
    ins,
    x_stride,
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
    inputs = split * (ins // SPLIT_K) + tl.arange(0, BLOCK_IN)
    seen = row[None, :] < rows
    weight_tile = weight_ptr + columns.to(tl.int64)[:, None] * ins + inputs[None, :]
    x_tile = x_ptr + row[None, :] * x_stride + inputs[:, None]
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    begin = 0
    if OVERLAPS:  # no kernel writes weights: load the first ones while others still run
        early = tl.load(weight_tile, eviction_policy="evict_first")
        await_predecessor(OVERLAPS)
        acc = tl.dot(early, tl.load(x_tile, mask=seen, other=0.0), acc, input_precision="ieee")
        begin = BLOCK_IN
    for first in tl.range(begin, ins // SPLIT_K, BLOCK_IN, num_stages=STAGES):
        # The weights are the left factor: a matrix instruction takes 64 rows of it at least.
        weight = tl.load(weight_tile + first, eviction_policy="evict_first")  # [OUT, IN]
        x = tl.load(x_tile + first, mask=seen, other=0.0)  # [IN, ROWS]
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    offsets = row[None, :] * outs + columns[:, None]
    is_last = True
    if SPLIT_K > 1:
        sums, size, counter = partial_ptr + offsets, rows * outs, counters_ptr + tile
        stored = tl.broadcast_to(seen, acc.shape)
        is_last = finish_split(acc, sums, size, stored, counter, split, SPLIT_K)
        if is_last:
            acc = add_splits(sums, size, stored, counter, SPLIT_K)
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + columns).to(tl.float32)[:, None]
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=seen)


@lru_cache(maxsize=1024)
def choose_split(rows: int, outs: int, ins: int, sms: int) -> int | None:
    """Return into how many ranges a product's inputs are split; None if cuBLAS should compute it.

    Measured on an H200: few rows are fastest with about 1.5 programs per SM; more rows, whose
    splits are costly to add, with 0.8 to 1.6.

    Args:
        rows: rows of x.
        outs: output features of the weight.
        ins: input features of the weight.
        sms: SMs of the device.
    """
    if not 0 < rows <= MOST_ROWS or outs % _BLOCK_OUT or ins % _BLOCK_IN:
        return None
    tiles = outs // _BLOCK_OUT
    wanted = sms * (1.4 if rows <= LEAST_ROWS else 0.8)
    split_k = 1
    while tiles * split_k < wanted and split_k < _MAX_SPLIT_K:
        if ins % (2 * split_k * _BLOCK_IN):
            break
        split_k *= 2
    return split_k


def _by_cublas(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, summed up in float32.

    Shapes are those of `pagewire.kernels.Linear`.
    """
    rows, ins = x.shape
    outs = weight.shape[0]
    split_k = None
    is_dense = weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if x.element_size() == 2 and x.stride(1) == 1 and is_dense:
        split_k = choose_split(rows, outs, ins, sm_count(x.device))
    if split_k is None:
        return _by_cublas(x, weight, bias, out)
    if out is None:
        out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    partial = out  # unused without a split
    if split_k > 1:
        partial = torch.empty((split_k, rows, outs), dtype=torch.float32, device=x.device)
    _linear_kernel[(outs // _BLOCK_OUT, split_k)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partial,
        split_counters(x.device),
        rows,
        outs,
        ins,
        x.stride(0),
        BLOCK_ROWS=max(next_power_of_2(rows), LEAST_ROWS),
        BLOCK_OUT=_BLOCK_OUT,
        BLOCK_IN=_BLOCK_IN,
        SPLIT_K=split_k,
        STAGES=_STAGES,
        HAS_BIAS=bias is not None,
        num_warps=4,
        **overlap_options(x.device, rows),
    )
    return out


def head_products(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each head's rows times the head's matrix, computed by cuBLAS.

    Shapes are those of `pagewire.kernels.HeadProducts`.
    """
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)
