# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sums of matrix products whose inputs are split among programs."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

_COUNTERS = 4096  # more than the SMs of any device, which limit splits


@triton.jit
def finish_split(acc, sums, size, mask, counter, split, SPLIT_K: tl.constexpr):
    """Store a split's sums; return whether it is the last of its tile to finish.

    Args:
        acc: its sums, float32.
        sums: pointers to where those of the first split go.
        size: from a split's sums to those of the next.
        mask: of `acc`.
        counter: pointer to the number of the tile's splits that are done, at first 0.
        split: its number.
        SPLIT_K: number of splits.
    """
    tl.store(sums + split * size, acc, mask=mask)
    tl.debug_barrier()  # all threads must have stored before the counter changes
    return tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT_K - 1


@triton.jit
def add_splits(sums, size, mask, counter, SPLIT_K: tl.constexpr):
    """Return the sums of all splits, in the program of the last one; set the counter to 0.

    They are always added in the same order, so that results do not depend on which is the last.
    """
    tl.store(counter, 0)
    acc = tl.zeros(mask.shape, dtype=tl.float32)
    for other in tl.static_range(SPLIT_K):
        acc += tl.load(sums + other * size, mask=mask, other=0.0, cache_modifier=".cg")
    return acc


@lru_cache(maxsize=16)
def split_counters(device: torch.device) -> torch.Tensor:
    """Return counters of the splits of a tile that are done, which every launch leaves at zero.

    All launches share them, so they must run one after another, on one stream.
    """
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
