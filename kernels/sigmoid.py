"""The logistic function; an element's result does not depend on its place in a batch."""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return `1 / (1 + exp(-x))`, computed in float32, in x's dtype.

    Written out on the CPU, where `torch.sigmoid` computes the ends of each thread's share
    differently.
    """
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return torch.exp(-x.float()).add_(1.0).reciprocal_().to(x.dtype)
