"""Rotary position embedding and the paged cache's new rows, in plain torch."""

from __future__ import annotations

import torch


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [T, heads, D] by `cos`, `sin` [T, 1, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotary_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate q in place, and write rotated k, and v, into their KV slots.

    Shapes are those of `pagewire.kernels.RotaryAndCache`.
    """
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    q.copy_(_rotated(q, cos, sin))
    block_size = k_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = _rotated(k, cos, sin)[kept]
    v_cache[blocks, :, offsets] = v[kept]
