# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Inputs of matrix products in FP8: each token's numbers and scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options
from pagewire.kernels.fp8_numbers import LARGEST, LEAST_SCALE

_MOST_AT_ONCE = 16384  # inputs of a token that a program quantises at a time
_A_WARP = 512  # of these
# With at most this number of rows, quantising overlaps with the launches before and after it.
MOST_OVERLAPPING_ROWS = 64


class Quantised(NamedTuple):
    """Inputs in FP8.

    Attributes:
        numbers: `[T, in]` e4m3.
        scale: `[T, ceil(in / columns)]` float32.
    """

    numbers: torch.Tensor
    scale: torch.Tensor


@triton.jit
def _store_quantised(x, scale, target, mask, LARGEST: tl.constexpr):
    x = tl.div_rn(x.to(tl.float32), scale)
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _quantise_kernel(
    x_ptr,  # [rows, ins]
    given_ptr,  # [1] or [rows] float32: scales, if they are given
    numbers_ptr,  # [rows, ins] contiguous
    scale_ptr,  # [rows, groups] contiguous
    ins,
    columns,
    x_stride,
    GIVEN_STEP: tl.constexpr,  # from one row's given scale to the next; -1 if none is given
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # whether a group has at most BLOCK columns
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start = group * columns
    end = tl.minimum(start + columns, ins)
    place = start + tl.arange(0, BLOCK)
    source, target = x_ptr + row * x_stride, numbers_ptr + row * ins
    x = tl.load(source + place, mask=place < end, other=0.0)
    if GIVEN_STEP >= 0:
        scale = tl.load(given_ptr + row * GIVEN_STEP)
    else:
        largest = tl.abs(x.to(tl.float32))
        if not IS_WHOLE:
            for first in range(BLOCK, columns, BLOCK):
                more = tl.load(source + first + place, mask=first + place < end, other=0.0)
                largest = tl.maximum(
                    largest, tl.abs(more.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL
                )
        # NaN in a row must not become a number.
        most = tl.max(largest, 0)
        most = tl.where(tl.sum((largest != largest).to(tl.int32), 0) > 0, float("nan"), most)
        scale = tl.maximum(tl.div_rn(most, LARGEST), LEAST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scale_ptr + row * tl.num_programs(1) + group, scale)
    _store_quantised(x, scale, target + place, place < end, LARGEST)
    if not IS_WHOLE:
        for first in range(BLOCK, columns, BLOCK):
            more = tl.load(source + first + place, mask=first + place < end, other=0.0)
            _store_quantised(more, scale, target + first + place, first + place < end, LARGEST)


def quantise(x: torch.Tensor, columns: int, input_scale: torch.Tensor | None) -> Quantised:
    """Return inputs `[T, in]` in FP8.

    Args:
        x: inputs.
        columns: inputs of a token that have one scale.
        input_scale: `[1]`, the scale of all, or `[T]`; None: each token's largest values decide.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, ins = x.shape
    groups = triton.cdiv(ins, columns)
    numbers = torch.empty((rows, ins), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(columns), _MOST_AT_ONCE)
    if rows:
        _quantise_kernel[(rows, groups)](
            x,
            x if input_scale is None else input_scale,
            numbers,
            scale,
            ins,
            columns,
            x.stride(0),
            GIVEN_STEP=-1 if input_scale is None else int(input_scale.numel() > 1),
            LARGEST=LARGEST,
            LEAST_SCALE=LEAST_SCALE,
            IS_WHOLE=columns <= block,
            BLOCK=block,
            num_warps=min(max(block // _A_WARP, 1), 16),
            **overlap_options(x.device, rows, MOST_OVERLAPPING_ROWS),
        )
    return Quantised(numbers, scale)
