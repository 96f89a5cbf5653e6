"""Experts with weights in four bits: in MXFP4, as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from pagewire.kernels import Ops
from pagewire.kernels.four_bits import FourBitWeights
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.layers.experts import ExpertsShape
from pagewire.shared.model.layers.parameters import NamedTarget
from pagewire.shared.model.quantization.config import Mxfp4Format

_GROUP = 32  # inputs that share a scale in MXFP4


@dataclass(eq=False, slots=True)
class FourBitExperts:
    """Experts whose weights are dequantised for each product, in registers on a GPU.

    Attributes:
        gate_up: of `[E, 2 I, H]`.
        down: of `[E, H, I]`.
    """

    shape: ExpertsShape
    ops: Ops
    gate_up: FourBitWeights
    down: FourBitWeights

    def apply(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        return self.ops.four_bit_experts(
            x,
            chosen,
            weights,
            self.gate_up,
            self.down,
            self.shape.activation,
            self.shape.interleaved,
        )

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills numbers, scales and biases."""
        for name, weights in zip(self.shape.stacked, (self.gate_up, self.down), strict=True):
            yield f"{name}_blocks", weights.pairs.unflatten(2, (-1, _GROUP // 2))
            yield f"{name}_scales", weights.scale
            if weights.bias is not None:
                yield f"{name}_bias", weights.bias

    def finish(self) -> None:
        """Do nothing: weights are stored as a checkpoint has them."""

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield numbers, scales and what else there is."""
        for each in (*self.gate_up, *self.down):
            if isinstance(each, torch.Tensor):
                yield each


def mxfp4_experts(
    shape: ExpertsShape, ops: Ops, device: torch.device, dtype: torch.dtype
) -> FourBitExperts:
    """Return experts in MXFP4 whose parameters are not filled.

    Args:
        shape: names and sizes.
        ops: kernels that suit the device.
        device: for the parameters.
        dtype: of biases.

    Raises:
        ModelLoadError: experts have tensors of their own, or sizes are not multiples of a group;
            one line.
    """
    if shape.each or shape.hidden % _GROUP or shape.inner % _GROUP:
        raise ModelLoadError(
            f"experts in {Mxfp4Format.name.upper()} are supported only in one tensor for all of a "
            f"layer, as gpt-oss has them, and with sizes that are multiples of {_GROUP} (they have "
            f"{shape.hidden} and {shape.inner})"
        )

    def empty(outs: int, ins: int) -> FourBitWeights:
        make = partial(torch.empty, device=device, dtype=torch.uint8)
        bias = make((shape.count, outs), dtype=dtype) if shape.biases else None
        pairs = make((shape.count, outs, ins // 2))
        return FourBitWeights(
            pairs, make((shape.count, outs, ins // _GROUP)), ins, _GROUP, bias=bias
        )

    gate_up, down = empty(2 * shape.inner, shape.hidden), empty(shape.hidden, shape.inner)
    return FourBitExperts(shape, ops, gate_up, down)
