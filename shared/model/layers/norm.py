"""Normalisations of the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagewire.kernels import Ops
from pagewire.shared.model.layers.linear import NamedTarget


@dataclass(eq=False, slots=True)
class RmsNorm:
    """RMS normalisation of the residual stream, after adding the output of the layer before.

    Attributes:
        weight: `[hidden]`; float32 if it multiplies in float32.
        eps: added to the mean square.
    """

    weight: torch.Tensor
    eps: float
    ops: Ops

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `x + residual` and that sum, both `[T, hidden]`."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual)

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the weight."""
        yield f"{name}.weight", self.weight


@dataclass(eq=False, slots=True)
class LayerNorm:
    """Layer normalisation without a bias, in plain torch; otherwise as `RmsNorm`.

    Attributes:
        weight: `[hidden]` float32.
        eps: added to the variance.
    """

    weight: torch.Tensor
    eps: float

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `x + residual` and that sum, both `[T, hidden]`."""
        summed = x if residual is None else x + residual
        normed = F.layer_norm(summed.float(), self.weight.shape, self.weight, None, self.eps)
        return normed.to(x.dtype), summed

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the weight."""
        yield f"{name}.weight", self.weight


Norm = RmsNorm | LayerNorm
