"""RMS normalisation with an optional residual, in plain torch."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x`, or `x + residual`, normalised by its root mean square, and that sum.

    Shapes and meaning are those of `pagewire.kernels.RmsNorm`.
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype), summed
