"""A mixture of experts, in plain torch: one expert after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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

    def project(
        inputs: torch.Tensor, expert: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return product(inputs, weight[expert], None if bias is None else bias[expert])

    return mix(
        x,
        chosen,
        weights,
        partial(project, weight=gate_up, bias=gate_up_bias),
        partial(project, weight=down, bias=down_bias),
        activation,
        interleaved,
    )


def mix(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    project_up: Callable[[torch.Tensor, int], torch.Tensor],
    project_down: Callable[[torch.Tensor, int], torch.Tensor],
    activation: GatedSilu,
    interleaved: bool,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

    Args:
        x: `[T, H]`.
        chosen: `[T, K]` int32.
        weights: `[T, K]` float32.
        project_up: returns an expert's first projection, `[n, 2 I]`, of `[n, H]` and its number.
        project_down: returns its second projection, `[n, H]`, of `[n, I]` and its number.
        activation: activation between them.
        interleaved: whether columns of gate and up alternate.
    """
    tokens, top_k = chosen.shape
    outputs = torch.empty((tokens, top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        inner = activate(project_up(x[token], expert).float(), activation, interleaved)
        outputs[token, choice] = project_down(inner.to(x.dtype), expert)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for choice in range(top_k):  # in the order of the choices, as the kernel adds them
        total += weights[:, choice, None] * outputs[:, choice]
    return total.to(x.dtype)


def activate(projected: torch.Tensor, activation: GatedSilu, interleaved: bool) -> torch.Tensor:
    """Return the gated first projection, `[n, I]`, of `[n, 2 I]`, in float32."""
    gate, up = _split(projected, interleaved)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    gated = gate / torch.exp(-activation.alpha * gate).add_(1.0)
    return gated * (up + activation.up_offset)


def _split(projected: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate's and the up projection's columns, `[n, I]` each, of `[n, 2 I]`."""
    if interleaved:
        return projected[:, ::2], projected[:, 1::2]
    gate, up = projected.chunk(2, dim=-1)
    return gate, up
