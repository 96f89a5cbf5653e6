"""`x @ weight.T + bias`, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, summed up in float32.

    Shapes are those of `pagewire.kernels.Linear`.
    """
    return F.linear(x, weight, bias)
