"""RMS and layer normalisation of hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagewire.kernels import Ops
from pagewire.shared.model.layers.parameters import NamedTarget, Parameters
from pagewire.shared.model.shard import Communicator, Cut


@dataclass(eq=False, slots=True)
class RmsNorm(Parameters):
    """RMS normalisation of the residual stream, after adding the output of the layer before.

    Attributes:
        weight: `[hidden]`; float32 if it multiplies in float32.
        eps: added to the mean square.
        plus_one: whether one is added to the checkpoint's weight.
        communicator: of the ranks, of whose parts x is the sum; None: x is complete.
    """

    weight: torch.Tensor
    eps: float
    ops: Ops
    plus_one: bool = False
    communicator: Communicator | None = None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `x + residual` and that sum, both `[T, hidden]`."""
        if self.communicator is not None:
            both = self.communicator.reduce_norm(x, self.weight, self.eps, residual)
            if both is not None:
                return both
            x = self.communicator.reduce(x)
        return self.ops.rms_norm(x, self.weight, self.eps, residual)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield the tensor that the checkpoint's weight fills."""
        yield "weight", self.weight

    def finish(self) -> None:
        """Add one to the weight where the checkpoint's is that much less."""
        if self.plus_one:
            self.weight.add_(1.0)


@dataclass(eq=False, slots=True)
class LayerNorm(Parameters):
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

    def targets(self) -> Iterator[NamedTarget]:
        """Yield the tensor that the checkpoint's weight fills."""
        yield "weight", self.weight


@dataclass(eq=False, slots=True)
class SplitRmsNorm(Parameters):
    """RMS normalisation of rows of which each rank has a part, in plain torch.

    Attributes:
        weight: `[part]`; float32 if it multiplies in float32.
        eps: added to the mean square.
        cut: the part of a row that this rank has.
        copies: number of ranks that have the same part.
        communicator: of the ranks.
    """

    weight: torch.Tensor
    eps: float
    cut: Cut
    copies: int
    communicator: Communicator

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the normalised `x + residual` and of that sum, `[T, part]`."""
        summed = x if residual is None else x + residual
        wide = summed.float()
        squares = self.communicator.reduce(wide.square().sum(-1, keepdim=True))
        scale = torch.rsqrt(squares / (self.copies * self.cut.size) + self.eps)
        return ((wide * scale).to(self.weight.dtype) * self.weight).to(x.dtype), summed

    def targets(self) -> Iterator[NamedTarget]:
        """Yield this rank's part of the weight, and where it is in the checkpoint's."""
        yield "weight", self.weight, (self.cut,)


Norm = RmsNorm | LayerNorm | SplitRmsNorm
