"""A mixture of experts with weights in four bits, in plain torch: an expert at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.gated_silu import SILU, GatedSilu
from pagewire.kernels.reference.experts import mix
from pagewire.kernels.reference.four_bits import dequantised


def four_bit_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: FourBitWeights,
    down: FourBitWeights,
    activation: GatedSilu = SILU,
    interleaved: bool = False,
    product: Callable[..., torch.Tensor] = F.linear,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

    Shapes are those of `pagewire.kernels.FourBitExperts`; `product(x, weight, bias)` is a
    projection, as `linear` is.
    """

    def project(inputs: torch.Tensor, expert: int, of_experts: FourBitWeights) -> torch.Tensor:
        own = of_experts.expert(expert)
        return product(inputs, dequantised(own, inputs.dtype), own.bias)

    return mix(
        x,
        chosen,
        weights,
        partial(project, of_experts=gate_up),
        partial(project, of_experts=down),
        activation,
        interleaved,
    )
