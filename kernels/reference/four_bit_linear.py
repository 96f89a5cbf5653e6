"""`x @ weight.T + bias` with weights in four bits, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.reference.four_bits import dequantised
from pagewire.kernels.reference.linear import linear


def four_bit_linear(
    x: torch.Tensor,
    weights: FourBitWeights,
    out: torch.Tensor | None = None,
    product: Callable[..., torch.Tensor] = linear,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`; see `pagewire.kernels.FourBitLinear`.

    `product(x, weight, bias, out)` is a projection, as `linear` is.
    """
    return product(x, dequantised(weights, x.dtype), weights.bias, out)
