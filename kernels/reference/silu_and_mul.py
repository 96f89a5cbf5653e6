"""The gated activations of feed-forward layers, in plain torch."""

from __future__ import annotations

import torch


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(x[:, :I]) * x[:, I:]` in x's dtype, `[T, 2 I] -> [T, I]`.

    Written out, in float32: `torch.exp` gives an element the same bits wherever it stands in the
    batch, `torch.nn.functional.silu` computes the ends of each thread's share differently.
    """
    gate, up = x.chunk(2, dim=-1)
    gate = gate.float()
    return (gate / torch.exp(-gate).add_(1.0)).mul_(up).to(x.dtype)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return `gelu(x[:, :I]) * x[:, I:]` in x's dtype, `[T, 2 I] -> [T, I]`.

    By tanh's approximation, where `(1 + tanh(u)) / 2` is `sigmoid(2 u)`. Written out as SiLU is,
    for the same reason.
    """
    gate, up = x.chunk(2, dim=-1)
    gate = gate.float()
    exponent = gate * (1.0 + 0.044715 * gate * gate) * 1.5957691216057308  # 2 sqrt(2 / pi)
    return (gate / torch.exp(-exponent).add_(1.0)).mul_(up).to(x.dtype)
