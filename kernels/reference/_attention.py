"""What both attention references share: one sequence's context, and exact attention over it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Queries attended at once: bounds the mask [512, context] and, on CUDA, the scores.
_QUERY_TILE = 512


def gather_context(
    cache: torch.Tensor,  # [NB, KH, BS, D]
    block_ids: torch.Tensor,  # [max_blocks]
    context_len: int,
) -> torch.Tensor:
    """Return one sequence's first rows in the cache, `[KH, context_len, D]` float32."""
    _, heads, block_size, head_dim = cache.shape
    blocks = -(-context_len // block_size)
    rows = cache[block_ids[:blocks].long()].transpose(0, 1)  # [KH, blocks, BS, D]
    return rows.reshape(heads, blocks * block_size, head_dim)[:, :context_len].float()


def attend(
    q: torch.Tensor,  # [S, H, D], the last S positions of the context
    keys: torch.Tensor,  # [KH, context, D] float32
    values: torch.Tensor,  # [KH, context, D] float32
    scale: float,
) -> torch.Tensor:  # [S, H, D] float32
    """Causal attention of one sequence's queries, in float32.

    Depends on nothing but the one sequence, so a row's bits are the same in any batch.
    """
    queries = q.shape[0]
    context = keys.shape[1]
    wide = q.float().transpose(0, 1)[None]  # [1, H, S, D]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for start in range(0, queries, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, queries)
        visible = context - queries + stop
        positions = torch.arange(context - queries + start, visible, device=q.device)
        seen = torch.arange(visible, device=q.device) <= positions[:, None]  # [tile, visible]
        attended = F.scaled_dot_product_attention(
            wide[:, :, start:stop],
            keys[None, :, :visible],
            values[None, :, :visible],
            attn_mask=seen if stop - start > 1 else None,
            scale=scale,
            enable_gqa=True,
        )
        out[start:stop] = attended[0].transpose(0, 1)
    return out
