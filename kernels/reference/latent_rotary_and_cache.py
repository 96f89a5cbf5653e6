"""Rotary embedding and new rows of a paged cache of latent vectors, in plain torch."""

from __future__ import annotations

import torch

from pagewire.kernels.reference.rms_norm import rms_norm
from pagewire.kernels.reference.rotary_and_cache import rotated


def latent_rotary_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    interleaved: bool = False,
) -> None:
    """Rotate q in place; write normalised latent vectors and rotated keys into their KV slots.

    Shapes are those of `pagewire.kernels.LatentRotaryAndCache`.
    """
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    turn = _rotated_pairs if interleaved else rotated
    q.copy_(turn(q, cos, sin))
    keys = turn(k[:, None], cos, sin)[:, 0]
    rows = torch.cat([rms_norm(latent, norm, eps)[0], keys], dim=-1)
    block_size = cache.shape[1]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    cache[slots // block_size, slots % block_size] = rows[kept]


def _rotated_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each number of `x` [T, heads, R] with the next; `cos`, `sin` [T, 1, R/2]."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
