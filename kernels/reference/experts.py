"""A mixture of experts, in plain torch: one expert after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pagewire.kernels.gated_silu import SILU, GatedSilu


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: GatedSilu = SILU,
    interleaved: bool = False,
    product: Callable[..., torch.Tensor] = F.linear,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

    Shapes are those of `pagewire.kernels.Experts`; `product(x, weight, bias)` is a projection, as
    `linear` is. The host reads which experts are chosen, so a CUDA graph cannot capture this.
    """
    tokens, top_k = chosen.shape
    outputs = torch.empty((tokens, top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        projected = product(x[token], gate_up[expert], bias).float()
        gate, up = _split(projected, interleaved)
        inner = _activate(gate, up, activation).to(x.dtype)
        bias = None if down_bias is None else down_bias[expert]
        outputs[token, choice] = product(inner, down[expert], bias)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(top_k):  # in the order of the choices, as the kernel adds them
        total += weights[:, choice, None] * outputs[:, choice]
    return total.to(x.dtype)


def _split(projected: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate's and the up projection's columns, `[n, I]` each, of `[n, 2 I]`."""
    if interleaved:
        return projected[:, ::2], projected[:, 1::2]
    gate, up = projected.chunk(2, dim=-1)
    return gate, up


def _activate(gate: torch.Tensor, up: torch.Tensor, activation: GatedSilu) -> torch.Tensor:
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    gated = gate / torch.exp(-activation.alpha * gate).add_(1.0)
    return gated * (up + activation.up_offset)
