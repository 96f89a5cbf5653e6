"""Attention of chunks to keys and values made of latent vectors, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagewire.kernels.reference._attention import attend, gather_context


def latent_prefill(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    key_matrices: torch.Tensor,
    value_matrices: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    chunks: Sequence[tuple[int, int]],
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fill `out` with the causal attention of packed chunks; see `pagewire.kernels.LatentPrefill`.

    `seq_lens` is not needed here.
    """
    heads, rank = key_matrices.shape[0], key_matrices.shape[2]
    starts = cu_query_lens.tolist()
    for row, (length, context) in enumerate(chunks):
        part = slice(starts[row], starts[row] + length)
        cached = gather_context(cache[:, None], block_tables[row], 0, context)[0]
        latents, rotated = cached[:, :rank], cached[:, rank:]
        keys = (latents @ key_matrices.float().transpose(1, 2)).to(cache.dtype)  # [H, S, N]
        values = (latents @ value_matrices.float()).to(cache.dtype)  # [H, S, V]
        whole = torch.cat([keys.float(), rotated.expand(heads, -1, -1)], dim=-1)
        q = torch.cat([q_nope[part], q_rope[part]], dim=-1)
        out[part] = attend(q, whole, values.float(), scale)
