"""Mixtures of experts whose weights are stored and multiplied in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pagewire.kernels.fp8_numbers import Fp8Weights
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.layers.experts import ExpertsShape, UnquantizedExperts
from pagewire.shared.model.layers.fp8 import E4M3, Fp8Matrix, fused_block, quantises_inputs
from pagewire.shared.model.layers.parameters import NamedTarget
from pagewire.shared.model.layers.place import Place
from pagewire.shared.model.quantization.config import Fp8Format
from pagewire.shared.model.shard import Cuts


class Fp8Experts:
    """Experts whose inputs are in FP8, too, unless activations are in float32.

    Args:
        shape: names and sizes.
        format: of the checkpoint.
        place: where the parameters are.
    """

    __slots__ = ("_down", "_format", "_gate_up", "_ops", "_quantises_inputs", "_shape", "_up_scale")

    def __init__(self, shape: ExpertsShape, format: Fp8Format, place: Place) -> None:
        self._shape, self._format, self._ops = shape, format, place.ops
        self._quantises_inputs = quantises_inputs(format, place.dtype)
        make = partial(_empty, shape, format, place)
        self._gate_up = make([shape.inner, shape.inner], shape.hidden)
        self._down = make([shape.hidden], shape.inner)
        self._up_scale: torch.Tensor | None = None  # of the up projections' inputs, as loaded
        if format.activations == "static":
            self._up_scale = place.empty(shape.count, dtype=torch.float32)

    def apply(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        shape = self._shape
        return self._ops.fp8_experts(
            x,
            chosen,
            weights,
            self._gate_up,
            self._down,
            self._quantises_inputs,
            shape.activation,
            shape.interleaved,
        )

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills each expert's three projections."""
        for expert in range(self._shape.count):
            for matrix in self._matrices(expert):
                yield from matrix.targets()
            scales = (self._gate_up.input_scale, self._up_scale, self._down.input_scale)
            for part, scale in zip(self._shape.each, scales, strict=True):
                if scale is not None:
                    yield f"{part.format(expert)}.input_scale", scale[expert]

    def _matrices(self, expert: int) -> tuple[Fp8Matrix, Fp8Matrix]:
        """Return one expert's weights and scales: those of gate and up, and of down."""
        gate, up, down = (part.format(expert) for part in self._shape.each)
        inner, cut = self._shape.inner, self._shape.cut
        rows: dict[str, Cuts] = {gate: (cut, None), up: (cut, None)}
        first, second = self._gate_up.expert(expert), self._down.expert(expert)
        return (
            Fp8Matrix({gate: inner, up: inner}, self._format, *first[:3], rows),
            Fp8Matrix({down: self._shape.hidden}, self._format, *second[:3], {down: (None, cut)}),
        )

    def finish(self) -> None:
        """Repeat scales that are those of larger blocks in the checkpoint.

        Raises:
            ModelLoadError: gate and up of an expert have inputs with different scales; one line.
        """
        if any(matrix.repeats_scales for matrix in self._matrices(0)):
            for expert in range(self._shape.count):
                for matrix in self._matrices(expert):
                    matrix.finish()
        gate, up = self._gate_up.input_scale, self._up_scale
        if gate is not None and up is not None and not torch.equal(gate, up):
            expert = int((gate != up).nonzero()[0])
            names = " and ".join(each.format(expert) for each in self._shape.each[:2])
            raise ModelLoadError(
                f"{names} have different input_scale, though their input is the same: set both to "
                "the larger one"
            )

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield weights, scales and biases as they are on the device."""
        for tensor in (*self._gate_up, *self._down, self._up_scale):
            if isinstance(tensor, torch.Tensor):
                yield tensor

    def fill_from(self, source: UnquantizedExperts) -> None:
        """Quantise another method's weights, with a scale for each row."""
        for weights, numbers, bias in (
            (self._gate_up, source.gate_up, source.gate_up_bias),
            (self._down, source.down, source.down_bias),
        ):
            flat = weights.numbers.flatten(0, 1), weights.scale.flatten(0, 1)
            Fp8Matrix({}, self._format, *flat, weights.block).fill(numbers.flatten(0, 1))
            if weights.bias is not None and bias is not None:
                weights.bias.copy_(bias)


def _empty(
    shape: ExpertsShape, format: Fp8Format, place: Place, parts: list[int], ins: int
) -> Fp8Weights:
    """Return one projection of all experts, whose parameters are not filled."""
    count, outs = shape.count, sum(parts)
    block = fused_block(format, parts, ins)
    scales = (count, -(-outs // block[0]), -(-ins // block[1]))
    is_static = format.activations == "static"
    return Fp8Weights(
        place.empty(count, outs, ins, dtype=E4M3),
        place.empty(*scales, dtype=torch.float32),
        block,
        place.empty(count, outs) if shape.biases else None,
        place.empty(count, dtype=torch.float32) if is_static else None,
    )
