"""Projections whose weights are stored and multiplied in FP8."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import itemgetter

import torch

from pagewire.kernels.fp8_numbers import LARGEST, LEAST_SCALE, Fp8Weights
from pagewire.kernels.reference.fp8_linear import dequantised
from pagewire.shared.model.layers.linear import LinearShape, Unquantized
from pagewire.shared.model.layers.parameters import NamedTarget
from pagewire.shared.model.layers.place import Place
from pagewire.shared.model.quantization.config import Fp8Format
from pagewire.shared.model.shard import Cuts, block_cuts

E4M3 = torch.float8_e4m3fn
_CHUNK = 1 << 24  # numbers that are quantised at a time, in float32


def fused_block(format: Fp8Format, parts: Iterable[int], columns: int) -> tuple[int, int]:
    """Return the rows and columns that one scale multiplies in several projections as one.

    Blocks of a projection begin with its first row. So blocks of several are cut where a projection
    begins inside of one.

    Args:
        format: of the checkpoint.
        parts: out features of each projection, in order.
        columns: in features.
    """
    starts = list(accumulate(parts))[:-1]
    rows = 1 if format.rows is None else math.gcd(format.rows, *starts)
    return rows, min(format.columns or columns, columns)


def quantises_inputs(format: Fp8Format, dtype: torch.dtype) -> bool:
    """Whether inputs in the model's dtype are quantised: in float32 they stay as they are."""
    return format.activations != "none" and dtype != torch.float32


@dataclass(eq=False, slots=True)
class Fp8Matrix:
    """The weights of some projections of one input, and their scales.

    Attributes:
        parts: out features of each projection in the checkpoint, by its name, in order.
        format: of the checkpoint.
        weight: `[sum of the parts, in]` e4m3.
        scale: `[ceil(sum of the parts / rows), ceil(in / columns)]` float32.
        block: these rows and columns.
        cuts: which rows and columns of a part this rank has, by its name, if not all.
    """

    parts: Mapping[str, int]
    format: Fp8Format
    weight: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    cuts: Mapping[str, Cuts] = field(default_factory=dict)

    @classmethod
    def empty(cls, format: Fp8Format, shape: LinearShape, place: Place) -> Fp8Matrix:
        """Return weights and scales that are not filled."""
        parts, outs, ins = shape.parts, shape.out_features, shape.in_features
        block = fused_block(format, parts.values(), ins)
        scales = (-(-outs // block[0]), -(-ins // block[1]))
        weight = place.empty(outs, ins, dtype=E4M3)
        scale = place.empty(*scales, dtype=torch.float32)
        cuts = {part: shape.cuts(part) for part in parts}
        return cls(parts, format, weight, scale, block, cuts)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills weights and scales: the first of the rows that a part's scales have."""
        for name, weight, scale in self._by_part():
            cuts = self.cuts.get(name, ())
            yield f"{name}.weight", weight, cuts
            rows = self.format.rows or len(weight)
            of_scale = block_cuts(name, cuts, self.format.units)
            yield f"{name}.weight_scale", scale[: -(-len(weight) // rows)], of_scale

    @property
    def repeats_scales(self) -> bool:
        """Whether a scale in the checkpoint is that of several blocks here."""
        return any((self.format.rows or size) != self.block[0] for size in self.parts.values())

    def finish(self) -> None:
        """Repeat scales of blocks that are larger in the checkpoint."""
        for _, weight, scale in self._by_part():
            rows = self.format.rows or len(weight)
            if rows != self.block[0]:
                of_file = scale[: -(-len(weight) // rows)].clone()
                scale.copy_(of_file.repeat_interleave(rows // self.block[0], 0)[: len(scale)])

    def _by_part(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each part's name, and its rows of weights and of scales."""
        start = 0
        for name, count in self.parts.items():
            end = start + count
            first, last = start // self.block[0], -(-end // self.block[0])
            yield name, self.weight[start:end], self.scale[first:last]
            start = end

    def fill(self, weight: torch.Tensor) -> None:
        """Quantise weights `[sum of the parts, in]`, with a scale for each row."""
        step = max(1, _CHUNK // weight.shape[1])
        for first in range(0, len(weight), step):
            rows = weight[first : first + step].float()
            scale = rows.abs().amax(1, keepdim=True).div_(LARGEST).clamp_(min=LEAST_SCALE)
            self.scale[first : first + step] = scale
            self.weight[first : first + step] = rows.div_(scale).clamp_(-LARGEST, LARGEST).to(E4M3)

    def permute_rows(self, part: str, order: torch.Tensor) -> None:
        """Give a part's rows another order; scales that they do not keep become those of rows."""
        blocks = torch.arange(len(order)) // self.block[0]
        if self.block[0] > 1 and not torch.equal(blocks[order], blocks):
            rows = self.scale.repeat_interleave(self.block[0], 0)
            self.scale, self.block = rows[: len(self.weight)].contiguous(), (1, self.block[1])
        order = order.to(self.weight.device)
        for name, weight, scale in self._by_part():
            if name == part:
                numbers = weight.view(torch.uint8)  # torch can index bytes on any device
                numbers.copy_(numbers[order])
                if self.block[0] == 1:
                    scale.copy_(scale[order])


class Fp8Linear:
    """`x @ weight.T + bias`, with inputs in FP8, too, unless activations are in float32.

    Attributes:
        bias: `[sum of the parts]` in the model's dtype, or None.
        input_scales: `[number of parts]` float32, if the checkpoint has scales of inputs.
    """

    __slots__ = ("_matrix", "_ops", "_quantises_inputs", "_runs", "_shape", "bias", "input_scales")

    def __init__(self, shape: LinearShape, format: Fp8Format, place: Place) -> None:
        self._shape = shape
        self._matrix = Fp8Matrix.empty(format, shape, place)
        self._ops = place.ops
        self._quantises_inputs = quantises_inputs(format, place.dtype)
        self.bias = shape.empty_bias(place)
        self.input_scales: torch.Tensor | None = None
        if format.activations == "static":
            self.input_scales = place.empty(len(shape.parts), dtype=torch.float32)
        self._runs: list[Fp8Weights] = []

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        if len(self._runs) == 1:
            return self._ops.fp8_linear(x, self._runs[0], self._quantises_inputs, out)
        project = self._ops.fp8_linear
        y = torch.cat([project(x, run, self._quantises_inputs) for run in self._runs], dim=1)
        return y if out is None else out.copy_(y)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills weights, scales and bias."""
        yield from self._matrix.targets()
        yield from self._shape.bias_targets(self.bias)
        if self.input_scales is not None:
            names, scales = self._shape.parts, self.input_scales.unbind()
            yield from ((f"{name}.input_scale", s) for name, s in zip(names, scales, strict=True))

    def finish(self) -> None:
        """Repeat scales, and find out which neighbours share a scale of their inputs."""
        self._matrix.finish()
        self._find_runs()

    def _find_runs(self) -> None:
        matrix, bias, scales = self._matrix, self.bias, self.input_scales
        if scales is None:
            self._runs = [Fp8Weights(matrix.weight, matrix.scale, matrix.block, bias)]
            return
        ends = accumulate(matrix.parts.values())
        runs = groupby(zip(scales.tolist(), scales.split(1), ends, strict=True), key=itemgetter(0))
        rows, start = matrix.block[0], 0
        self._runs = []
        for _, run in runs:
            *_, (_, scale, end) = run
            self._runs.append(
                Fp8Weights(
                    matrix.weight[start:end],
                    matrix.scale[start // rows : -(-end // rows)],
                    matrix.block,
                    None if bias is None else bias[start:end],
                    scale,
                )
            )
            start = end

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield weights, scales and bias as they are on the device."""
        yield self._matrix.weight
        yield self._matrix.scale
        yield from (tensor for tensor in (self.bias, self.input_scales) if tensor is not None)

    def permute_rows(self, part: str, order: torch.Tensor) -> None:
        """Give a part's rows another order."""
        self._matrix.permute_rows(part, order)
        for name, rows, *_ in self.targets():
            if name == f"{part}.bias":
                rows.copy_(rows[order.to(rows.device)])
        self._find_runs()

    def matrix(self) -> torch.Tensor:
        """Return what the weights stand for, in float32."""
        matrix = self._matrix
        return dequantised(Fp8Weights(matrix.weight, matrix.scale, matrix.block))

    def fill_from(self, source: Unquantized) -> None:
        """Quantise another method's weights, with a scale for each row."""
        self._matrix.fill(source.weight)
        if self.bias is not None and source.bias is not None:
            self.bias.copy_(source.bias)
        self._find_runs()
