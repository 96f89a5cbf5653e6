"""Rotary position embedding, in plain torch."""

from __future__ import annotations

import torch


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `x` [T, heads, D] in place by `cos`, `sin` [T, 1, D/2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    x[..., :half] = rotated_first
    x[..., half:] = rotated_second


def rotary_embedding(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
) -> None:
    """Rotate q and k in place, half-split pairing, in float32.

    Shapes are those of `pagewire.kernels.RotaryEmbedding`.
    """
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)
