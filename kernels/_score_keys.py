# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Scores packed with an id, such as that of a token or expert, so that one maximum gives both.

A key is a 64-bit integer with the score's bits above the id's, as in OpenAI's triton_kernels.
Keys of different ids differ for any scores.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_keys(scores, ids):
    """Map scores and their ids to int64: a higher score is greater, then a lower id."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def score_of(key):
    """Return the score of a key, float32."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    """Return the id of a key, int32."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
