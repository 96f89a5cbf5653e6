"""A mixture of experts with weights in FP8, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pagewire.kernels.fp8_numbers import Fp8Weights
from pagewire.kernels.gated_silu import SILU, GatedSilu
from pagewire.kernels.reference.experts import mix
from pagewire.kernels.reference.fp8_linear import fp8_linear


def fp8_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Fp8Weights,
    down: Fp8Weights,
    quantises_inputs: bool = True,
    activation: GatedSilu = SILU,
    interleaved: bool = False,
    product: Callable[..., torch.Tensor] = F.linear,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

    Shapes are those of `pagewire.kernels.Fp8Experts`; `product` is as for `fp8_linear`.
    """

    def project(inputs: torch.Tensor, expert: int, of_experts: Fp8Weights) -> torch.Tensor:
        return fp8_linear(inputs, of_experts.expert(expert), quantises_inputs, product=product)

    return mix(
        x,
        chosen,
        weights,
        partial(project, of_experts=gate_up),
        partial(project, of_experts=down),
        activation,
        interleaved,
    )
