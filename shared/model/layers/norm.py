"""Normalisations of the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from pagewire.kernels import Ops
from pagewire.shared.model.layers.linear import NamedTarget
from pagewire.shared.model.model_config import NormStyle


class RmsNorm:
    """RMS normalisation of the residual stream, after adding the output of the layer before.

    Attributes:
        weight: `[hidden]`; float32 if it multiplies in float32.
        eps: added to the mean square.
    """

    __slots__ = ("_op", "eps", "weight")

    def __init__(
        self,
        size: int,
        eps: float,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        style: NormStyle,
    ) -> None:
        kept = dtype if style == "rounded" else torch.float32
        self.weight = torch.empty(size, device=device, dtype=kept)
        self.eps = eps
        self._op = ops.rms_norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `x + residual` and that sum, both `[T, hidden]`."""
        return self._op(x, self.weight, self.eps, residual)

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the weight."""
        yield f"{name}.weight", self.weight


class LayerNorm:
    """Layer normalisation without a bias, in plain torch; otherwise as `RmsNorm`.

    Attributes:
        weight: `[hidden]` float32.
        eps: added to the variance.
    """

    __slots__ = ("eps", "weight")

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        self.weight = torch.empty(size, device=device, dtype=torch.float32)
        self.eps = eps

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
