"""Experts with weights in four bits: in MXFP4, or in INT4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pagewire.kernels import Ops
from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.reference.four_bits import pack_pairs
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.layers.experts import ExpertsShape
from pagewire.shared.model.layers.int4 import Int4Numbers, Int4Tensors
from pagewire.shared.model.layers.linear import LinearShape
from pagewire.shared.model.layers.parameters import NamedTarget
from pagewire.shared.model.layers.place import Place
from pagewire.shared.model.quantization.config import Int4Format, Mxfp4Format
from pagewire.shared.model.shard import Cuts, block_cuts

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
        """Yield what fills MXFP4; the checkpoint's tensors in INT4 are `Int4ExpertTensors`."""
        if self.gate_up.zeros is not None:
            return
        shape = self.shape
        cuts: tuple[Cuts, Cuts] = ((shape.gate_up_cut, None), (None, shape.cut))
        parts = zip(shape.stacked, (self.gate_up, self.down), cuts, strict=True)
        for name, weights, cut in parts:
            of_groups = (None, *block_cuts(name, cut, Mxfp4Format().units))
            yield f"{name}_blocks", weights.pairs.unflatten(2, (-1, _GROUP // 2)), of_groups
            yield f"{name}_scales", weights.scale, of_groups
        yield from shape.bias_targets(self.gate_up.bias, self.down.bias)

    def finish(self) -> None:
        """Put MXFP4's numbers, of which bytes have neighbours, where kernels expect them."""
        if self.gate_up.zeros is not None:
            return  # `fill_from` fills INT4
        for pairs in (*self.gate_up.pairs, *self.down.pairs):
            pack_pairs(torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1), pairs)

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield numbers, scales and what else there is."""
        for tensor in (*self.gate_up, *self.down):
            if isinstance(tensor, torch.Tensor):
                yield tensor

    def fill_from(self, source: Int4ExpertTensors) -> None:
        """Keep what a checkpoint's tensors in INT4 hold.

        Raises:
            ModelLoadError: inputs are not in the groups that config.json says; one line.
        """
        has_order = False
        for number, (gate_up, down) in enumerate(source.experts):
            for weights, tensors in ((self.gate_up, gate_up), (self.down, down)):
                parts = tensors.by_part()
                has_order |= any(part.order is not None for part in parts)
                _fill(weights.expert(number), parts)
        if not has_order:
            self.gate_up = self.gate_up._replace(group_of=None)
            self.down = self.down._replace(group_of=None)


class Int4ExpertTensors:
    """The tensors of experts in INT4, each with its own, as a checkpoint has them.

    Attributes:
        experts: the tensors of each expert's gate and up projection, and of its down projection.
    """

    def __init__(self, shape: ExpertsShape, format: Int4Format, place: Place) -> None:
        self.experts: list[tuple[Int4Tensors, Int4Tensors]] = []
        for number in range(shape.count):
            gate, up, down = (name.format(number) for name in shape.each)
            inner = shape.cut or shape.inner
            first = LinearShape.of(shape.hidden, {gate: inner, up: inner})
            second = LinearShape.of(inner, {down: shape.hidden})
            tensors = Int4Tensors(first, format, place), Int4Tensors(second, format, place)
            self.experts.append(tensors)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills packed numbers, zeros and scales."""
        for expert in self.experts:
            for tensors in expert:
                yield from tensors.targets()

    def finish(self) -> None:
        """Do nothing: the method that keeps the numbers converts them."""


def mxfp4_experts(shape: ExpertsShape, place: Place) -> FourBitExperts:
    """Return experts in MXFP4 whose parameters are not filled.

    Args:
        shape: names and sizes.
        place: where the parameters are.

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
        bias = place.empty(shape.count, outs).zero_() if shape.biases else None
        pairs = place.empty(shape.count, outs, ins // 2, dtype=torch.uint8)
        scale = place.empty(shape.count, outs, ins // _GROUP, dtype=torch.uint8)
        return FourBitWeights(pairs, scale, ins, _GROUP, bias=bias)

    gate_up, down = empty(2 * shape.inner, shape.hidden), empty(shape.hidden, shape.inner)
    return FourBitExperts(shape, place.ops, gate_up, down)


def int4_experts(shape: ExpertsShape, format: Int4Format, place: Place) -> FourBitExperts:
    """Return experts in INT4 whose parameters are not filled.

    Args:
        shape: names and sizes; each expert has tensors of its own.
        format: of the checkpoint.
        place: where the parameters are.
    """

    def empty(parts: int, outs: int, ins: int) -> FourBitWeights:
        group = format.group or ins
        scales = (shape.count, outs, -(-ins // group))
        order = None
        if format.ordered:
            order = place.empty(shape.count, parts, ins, dtype=torch.int32)
        return FourBitWeights(
            place.empty(shape.count, outs, FourBitWeights.row_bytes(ins), dtype=torch.uint8),
            place.empty(*scales, dtype=torch.float32),
            ins,
            group,
            place.empty(*scales, dtype=torch.float32),
            order,
        )

    gate_up, down = empty(2, 2 * shape.inner, shape.hidden), empty(1, shape.hidden, shape.inner)
    return FourBitExperts(shape, place.ops, gate_up, down)


def _fill(weights: FourBitWeights, parts: Sequence[Int4Numbers]) -> None:
    """Fill one expert's projection of its parts, inputs in the order in which they are."""
    if weights.zeros is None:
        return
    pack_pairs(torch.cat([part.in_order_of_inputs() for part in parts]), weights.pairs)
    torch.cat([part.scale for part in parts], out=weights.scale)
    torch.cat([part.zeros for part in parts], out=weights.zeros)
    if weights.group_of is not None:
        usual = torch.arange(weights.ins, dtype=torch.int32, device=weights.pairs.device)
        usual //= weights.group
        for part, group_of in zip(parts, weights.group_of, strict=True):
            group_of.copy_(usual)
            if part.order is not None:
                group_of.index_copy_(0, part.order, usual)
