"""Rotary position embedding and the paged cache's new rows, in plain torch."""

from __future__ import annotations

import torch

from pagewire.kernels.fp8_numbers import LARGEST, UNSCALED, KvScales
from pagewire.kernels.reference.rms_norm import rms_norm


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R numbers of each head of `x` [T, heads, D]; `cos`, `sin` [T, 1, R/2]."""
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return torch.cat(turned, dim=-1).to(x.dtype)


def rotary_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scales: KvScales = UNSCALED,
) -> None:
    """Rotate q in place, and write rotated k, and v, into their KV slots.

    Shapes are those of `pagewire.kernels.RotaryAndCache`.
    """
    if q_norm is not None and k_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps)[0])
        k = rms_norm(k, k_norm, eps)[0]
    if cos_sin_cache is not None:
        cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        q.copy_(rotated(q, cos, sin))
        k = rotated(k, cos, sin)
    block_size = k_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    for cache, rows, scale in zip((k_cache, v_cache), (k, v), kv_scales, strict=True):
        if cache.dtype == torch.float8_e4m3fn:
            in_fp8 = quantised(rows[kept], scale).view(torch.uint8)
            # As bytes: torch cannot index numbers in FP8 to write them.
            cache.view(torch.uint8)[blocks, :, offsets] = in_fp8
        else:
            cache[blocks, :, offsets] = rows[kept]


def quantised(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the numbers in FP8 that, times the scale, stand for those of x."""
    scaled = x.float() * (1.0 / scale)
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
