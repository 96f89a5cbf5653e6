"""Paged decode attention in plain torch, one sequence at a time."""

from __future__ import annotations

import torch

from pagewire.kernels.fp8_numbers import UNSCALED, KvScales
from pagewire.kernels.reference._attention import attend, gather_context, window_start


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: KvScales = UNSCALED,
) -> torch.Tensor:
    """Return the attention of one query token per sequence to its paged context.

    Shapes are those of `pagewire.kernels.PagedDecode`. A row depends on its own sequence alone.
    """
    out = torch.empty_like(q) if out is None else out
    for row, context_len in enumerate(seq_lens.tolist()):
        if context_len < 0:
            continue
        if context_len == 0:
            out[row].zero_()
            continue
        first = window_start(context_len - 1, window)
        keys = gather_context(k_cache, block_tables[row], first, context_len, kv_scales.keys)
        values = gather_context(v_cache, block_tables[row], first, context_len, kv_scales.values)
        out[row : row + 1] = attend(q[row : row + 1], keys, values, scale, window, soft_cap, sinks)
    return out
