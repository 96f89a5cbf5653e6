# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Reads and writes a KV cache in FP8 (e4m3) within attention kernels.

Its numbers are converted after they are loaded, to float32 if queries have it and else to float16,
which holds each of them exactly. A GPU converts e4m3 to float16 in one instruction and to bfloat16
in several, which would take the time that fewer bytes save. Products are then of float16, so
queries in bfloat16 must fit its range: `as_operand` brings each into it by a power of two. Scales
are not applied to the numbers: that of keys is a factor of the scores, that of values a factor of
the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._scores import LOG2_E
from pagewire.kernels.fp8_numbers import LARGEST, KvScales

_LARGEST: tl.constexpr = tl.constexpr(LARGEST)  # kernels read only constants of this type


@triton.jit
def as_operand(q, scale_log2, k_ptr):
    """Return queries `[rows, D]` as operands of products with keys, and the scores' factor.

    Over a cache in FP8, each query in bfloat16 is divided by the power of two that is next below
    its largest magnitude, and its row of scores multiplied by that. This is exact, but for numbers
    that are 2**14 times smaller than the largest: they lose bits that the sum of products has not.
    """
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        largest = tl.max(tl.abs(wide), axis=1, keep_dims=True)  # [rows, 1]
        exponent = largest.to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)  # so that both powers are normal
        q = (wide * ((254 - exponent) << 23).to(tl.float32, bitcast=True)).to(tl.float16)
        scale_log2 = scale_log2 * (exponent << 23).to(tl.float32, bitcast=True)  # [rows, 1]
    return q, scale_log2


@triton.jit
def times_scale(result, v_scale, v_ptr):
    """Return weighted sums of the cache's numbers as those of values."""
    if v_ptr.dtype.element_ty == tl.float8e4nv:
        result = result * v_scale
    return result


@triton.jit
def to_cache(x, inverse_scale, target):
    """Return numbers as a cache has them that begins at `target`."""
    if target.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32) * inverse_scale
        # A conversion without this may yield anything for what is out of range.
        x = tl.clamp(x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(target.dtype.element_ty)


def scores_factor(scale: float, k_cache: torch.Tensor, scales: KvScales) -> float:
    """Return the factor of scores in base 2."""
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    return scale * LOG2_E * (scales.keys if is_fp8 else 1.0)
