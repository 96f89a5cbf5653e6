# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Soft caps and attention sinks of scores; all scores are in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """Return `CAP * tanh(scores / CAP)`.

    It uses exp2, which is the same in the interpreter and on a GPU, of the negative magnitude: this
    does not overflow.
    """
    powers = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634 / CAP))
    magnitudes = CAP * (1.0 - powers) / (1.0 + powers)
    return tl.where(scores < 0, -magnitudes, magnitudes)


@triton.jit
def sink_weight(sinks, m_i):
    """Return the terms of sinks in the sums of weights, relative to `m_i`.

    They are cut at 2**126, next to which all other weights are negligible.
    """
    return tl.exp2(tl.minimum(sinks.to(tl.float32) * 1.4426950408889634 - m_i, 126.0))
