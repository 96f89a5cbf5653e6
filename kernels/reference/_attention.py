"""What the attention references share: one sequence's context, and exact attention over it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Queries computed at once; bounds the mask [512, context] and, on CUDA, the scores.
_QUERY_TILE = 512


def gather_context(
    cache: torch.Tensor,  # [NB, KH, BS, D]
    block_ids: torch.Tensor,  # [max_blocks]
    start: int,
    stop: int,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return one sequence's rows from `start` to `stop`, `[KH, stop - start, D]` float32.

    Blocks before that of `start` are not looked up. In FP8, numbers are multiplied by the scale.
    """
    _, heads, block_size, head_dim = cache.shape
    first, end = start // block_size, -(-stop // block_size)
    rows = cache[block_ids[first:end].long()].transpose(0, 1)  # [KH, blocks, BS, D]
    flat = rows.reshape(heads, (end - first) * block_size, head_dim)
    context = flat[:, start - first * block_size : stop - first * block_size].float()
    return context * scale if cache.dtype == torch.float8_e4m3fn else context


def window_start(position: int, window: int | None) -> int:
    """Return the first position that the query at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


def attend(
    q: torch.Tensor,  # [S, H, D], the last S positions of the context
    keys: torch.Tensor,  # [KH, context, D] float32
    values: torch.Tensor,  # [KH, context, V] float32
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:  # [S, H, V] float32
    """Return the causal attention of one sequence's queries, computed in float32.

    The result depends on this sequence alone, so a row's bits are the same in any batch.
    """
    queries = q.shape[0]
    context = keys.shape[1]
    wide = q.float().transpose(0, 1)[None]  # [1, H, S, D]
    shape = (*q.shape[:2], values.shape[2])
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    for start in range(0, queries, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, queries)
        position, end = context - queries + start, context - queries + stop
        first = window_start(position, window)
        visible = slice(first, end)
        rows = torch.arange(position, end, device=q.device)[:, None]
        columns = torch.arange(first, end, device=q.device)
        seen = columns <= rows  # [tile, visible]
        if window is not None:
            seen &= columns > rows - window
        part = wide[:, :, start:stop]
        if soft_cap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                part,
                keys[None, :, visible],
                values[None, :, visible],
                attn_mask=seen if stop - start > 1 else None,
                scale=scale,
                enable_gqa=True,
            )[0]
        else:
            attended = _attend_written_out(
                part[0], keys[:, visible], values[:, visible], seen, scale, soft_cap, sinks
            )
        out[start:stop] = attended.transpose(0, 1)
    return out


def _attend_written_out(
    q: torch.Tensor,  # [H, S, D] float32
    keys: torch.Tensor,  # [KH, visible, D] float32
    values: torch.Tensor,  # [KH, visible, V] float32
    seen: torch.Tensor,  # [S, visible] bool
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,  # [H]
) -> torch.Tensor:  # [H, S, V] float32
    """Return attention whose scores are capped, or whose softmax includes sinks."""
    group = q.shape[0] // keys.shape[0]
    scores = q @ keys.repeat_interleave(group, dim=0).transpose(1, 2) * scale  # [H, S, visible]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[:, :, : keys.shape[1]]
    return weights @ values.repeat_interleave(group, dim=0)
