"""Root mean square normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from pagewire.kernels import Ops
from pagewire.shared.model.layers.linear import NamedTarget

# How the weight multiplies: the normalised value rounded to the activations' dtype, as in Llama;
# the value in float32; or likewise the weight of the checkpoint plus one, as in Gemma.
NormStyle = Literal["rounded", "wide", "plus one"]


class RmsNorm:
    """RMS normalisation of the residual stream, after adding what the last layer computed.

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
        style: NormStyle = "rounded",
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
