"""`x @ weight.T + bias`, and one product per head, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, summed up in float32.

    Shapes are those of `pagewire.kernels.Linear`.
    """
    product = F.linear(x, weight, bias)
    return product if out is None else out.copy_(product)


def head_products(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each head's rows times its own matrix.

    Shapes are those of `pagewire.kernels.HeadProducts`.
    """
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)
