"""Attention to paged latent vectors in plain torch, one sequence at a time."""

from __future__ import annotations

import torch

from pagewire.kernels.reference._attention import attend, gather_context


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    cu_query_lens: torch.Tensor | None = None,
    max_query_len: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of all heads to one cached latent vector per token.

    Shapes are those of `pagewire.kernels.LatentAttention`; `max_query_len` is not needed here. A
    row depends on its own sequence alone.
    """
    out = torch.empty_like(q_latent) if out is None else out
    rank = q_latent.shape[2]
    lengths = seq_lens.tolist()
    starts = list(range(len(lengths) + 1)) if cu_query_lens is None else cu_query_lens.tolist()
    for row, context_len in enumerate(lengths):
        part = slice(starts[row], starts[row + 1])
        if part.start == part.stop or context_len < 0:
            continue
        if context_len == 0:
            out[part].zero_()
            continue
        keys = gather_context(cache[:, None], block_tables[row], 0, context_len)
        q = torch.cat([q_latent[part], q_rope[part]], dim=-1)
        out[part] = attend(q, keys, keys[:, :, :rank], scale)
    return out
