"""Paged prefill attention in plain torch, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagewire.kernels.fp8_numbers import UNSCALED, KvScales
from pagewire.kernels.reference._attention import attend, gather_context, window_start


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: KvScales = UNSCALED,
    chunks: Sequence[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """Return causal attention of packed query chunks over their paged context.

    Shapes are those of `pagewire.kernels.PagedPrefill`; `max_query_len` is not needed here. A
    chunk's rows depend on its own sequence alone.
    """
    out = torch.empty_like(q) if out is None else out
    starts = cu_query_lens.tolist()
    for row, context_len in enumerate(seq_lens.tolist()):
        start, stop = starts[row], starts[row + 1]
        if start == stop:
            continue
        first = window_start(context_len - (stop - start), window)
        keys = gather_context(k_cache, block_tables[row], first, context_len, kv_scales.keys)
        values = gather_context(v_cache, block_tables[row], first, context_len, kv_scales.values)
        out[start:stop] = attend(q[start:stop], keys, values, scale, window, soft_cap, sinks)
    return out
