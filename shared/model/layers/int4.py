"""Projections with weights in INT4, of which inputs share scales in groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.reference.four_bits import dequantised, pack_pairs, scaled
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.layers.linear import LinearShape
from pagewire.shared.model.layers.parameters import NamedTarget
from pagewire.shared.model.layers.place import Place
from pagewire.shared.model.quantization.config import Int4Format
from pagewire.shared.model.shard import Cuts, block_cuts

GROUP_INDEX = "g_idx"  # the end of the name of a tensor that has each input's group
_OF_WORD = 8  # numbers of 4 bits in 32
# Where AWQ stores the columns of eight, from the lowest bits on: column 1 is the fifth.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
# What GPTQ's first version subtracts from a word of zeros, so that a zero of 0 borrows from the
# next one.
_GPTQ_ONES = 0x11111111


@dataclass(frozen=True, slots=True)
class Int4Numbers:
    """Weights in any INT4 layout as numbers: `(numbers - zeros) * scale`.

    Attributes:
        numbers: `[out, in]` uint8 from 0 to 15, inputs in the order of their groups.
        scale: `[out, groups]` float32.
        zeros: `[out, groups]` uint8.
        order: `[in]` int64, which input each is; None: they are in order.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None = None

    def in_order_of_inputs(self) -> torch.Tensor:
        """Return the numbers, inputs in the order in which they are."""
        if self.order is None:
            return self.numbers
        return torch.empty_like(self.numbers).index_copy_(1, self.order, self.numbers)


class Int4Tensors:
    """The tensors of projections as a checkpoint has them; they are converted when filled."""

    def __init__(self, shape: LinearShape, format: Int4Format, place: Place) -> None:
        self._format, self._ins = format, shape.in_features
        self.shape = shape
        self.bias = shape.empty_bias(place)
        self._refuse_order()
        make = _packed_tensors if format.layout == "packed" else _word_tensors
        self._tensors = {
            part: {
                name: place.empty(*size, dtype=kind)
                for name, (size, kind) in make(format, outs, shape.in_features).items()
            }
            for part, outs in shape.parts.items()
        }
        self._put_in_order()

    def _refuse_order(self) -> None:
        """Refuse to cut inputs that are in any order: each rank would have parts of all groups.

        Raises:
            ModelLoadError: this is so; one line.
        """
        if self._format.ordered and self.shape.columns is not None:
            raise ModelLoadError(
                f"{', '.join(self.shape.parts)}: several ranks cannot share groups whose inputs "
                "are in any order (desc_act or actorder): use one rank, or another checkpoint"
            )

    def _put_in_order(self) -> None:
        """Give each input its usual group, in case that nothing fills these tensors."""
        groups = torch.arange(self._ins) // self._group
        for tensors in self._tensors.values():
            for name, tensor in tensors.items():
                if name.endswith(GROUP_INDEX):
                    tensor.copy_(groups)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills packed numbers, zeros, scales and biases."""
        for part, tensors in self._tensors.items():
            for name, tensor in tensors.items():
                yield f"{part}.{name}", tensor, self._cuts(part, name)
        yield from self.shape.bias_targets(self.bias)

    def _cuts(self, part: str, name: str) -> Cuts:
        """Return which part of a checkpoint's tensor this rank has."""
        rows, columns = self.shape.cuts(part)
        group, word = self._format.group, _OF_WORD
        sizes = {  # by the name's end: rows and columns for one number of the tensor
            "weight_packed": (1, word),
            "weight_scale": (1, group),
            "weight_zero_point": (word, group),
            "scales": (1, group),
            "qzeros": (word, group),
            "qweight": (word, 1) if self._format.layout == "awq" else (1, word),
        }
        if name.endswith(GROUP_INDEX):
            return (columns,)
        if name not in sizes:
            return ()
        cuts = block_cuts(f"{part}.{name}", (rows, columns), sizes[name])
        return cuts if name.startswith("weight") else cuts[::-1]

    def finish(self) -> None:
        """Do nothing: the method that keeps the numbers converts them."""

    def numbers(self) -> Int4Numbers:
        """Return the numbers of all projections.

        Raises:
            ModelLoadError: inputs are not in the groups that config.json says; one line.
        """
        parts = self.by_part()
        if len(parts) == 1:
            return parts[0]
        return Int4Numbers(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat([part.zeros for part in parts]),
        )

    def by_part(self) -> list[Int4Numbers]:
        """Return the numbers of each projection.

        Raises:
            ModelLoadError: inputs are not in the groups that config.json says; one line.
        """
        return [self._part(name, tensors) for name, tensors in self._tensors.items()]

    def matrix(self) -> torch.Tensor:
        """Return what the weights stand for, in float32."""
        numbers = self.numbers()
        weight = scaled(numbers.numbers, numbers.scale, numbers.zeros, self._group)
        return weight if numbers.order is None else torch.empty_like(weight).index_copy_(
            1, numbers.order, weight
        )  # fmt: skip

    @property
    def _group(self) -> int:
        return self._format.group or self._ins

    def _part(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Int4Numbers:
        layout = self._format.layout
        if layout == "packed":
            numbers = _unpacked(tensors["weight_packed"])[:, : self._ins]
            zeros = torch.full(tensors["weight_scale"].shape, 8, dtype=torch.uint8)
            zeros = zeros.to(numbers.device)
            if "weight_zero_point" in tensors:
                zeros = _unpacked(tensors["weight_zero_point"].t()).t()[: len(numbers)]
            part = Int4Numbers(numbers, tensors["weight_scale"], zeros)
            return self._ordered(name, part, tensors.get("weight_g_idx"))
        scale = tensors["scales"].t()
        words = tensors["qzeros"] + (_GPTQ_ONES if layout == "gptq" else 0)
        zeros = _unpacked(words)  # [groups, at least out]
        if layout == "awq":
            numbers = _unpacked(tensors["qweight"]).unflatten(1, (-1, _OF_WORD))[..., _AWQ_PLACES]
            zeros = zeros.unflatten(1, (-1, _OF_WORD))[..., _AWQ_PLACES].flatten(1)
            return Int4Numbers(numbers.flatten(1).t()[: len(scale)], scale, zeros.t()[: len(scale)])
        numbers = _unpacked(tensors["qweight"].t())[:, : self._ins]
        return self._ordered(
            name, Int4Numbers(numbers, scale, zeros.t()[: len(scale)]), tensors["g_idx"]
        )

    def _ordered(self, name: str, part: Int4Numbers, groups: torch.Tensor | None) -> Int4Numbers:
        """Return numbers in the order of their groups; a group of -1 says that none has another."""
        if groups is None or bool((groups < 0).any()):
            return part
        usual = torch.arange(self._ins, device=part.numbers.device) // self._group
        if self.shape.columns is not None and groups.any():
            groups = groups - self.shape.columns.ranges[0][0] // self._group
        if torch.equal(groups, usual.to(groups.dtype)):
            return part
        if not (self._format.ordered or groups.any()):  # as some writers say that all is usual
            return part
        order = groups.long().argsort(stable=True)
        if not self._format.ordered or not torch.equal(groups.long()[order], usual):
            raise ModelLoadError(
                f"{name}: its g_idx does not put {self._group} inputs into each group in "
                f"{'any' if self._format.ordered else 'ascending'} order, as config.json says"
            )
        return Int4Numbers(part.numbers[:, order], part.scale, part.zeros, order)


class Int4Linear:
    """`x @ weight.T + bias`, with weights that are dequantised for each product.

    Attributes:
        bias: `[sum of the parts]` in the model's dtype, or None.
    """

    def __init__(self, shape: LinearShape, format: Int4Format, place: Place) -> None:
        outs, ins = shape.out_features, shape.in_features
        self._shape, self._ops, group = shape, place.ops, format.group or ins
        self.bias = shape.empty_bias(place)
        self._parameters = (
            place.empty(outs, FourBitWeights.row_bytes(ins), dtype=torch.uint8),
            place.empty(outs, -(-ins // group), dtype=torch.float32),
            place.empty(outs, -(-ins // group), dtype=torch.float32),
        )
        pairs, scale, zeros = self._parameters
        self._weights = FourBitWeights(pairs, scale, ins, group, zeros, bias=self.bias)
        self._order: torch.Tensor | None = None
        if format.ordered:
            self._order = place.empty(ins, dtype=torch.int64)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        x = x if self._order is None else x[:, self._order]
        return self._ops.four_bit_linear(x, self._weights, out)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield nothing: the checkpoint's tensors are those of `Int4Tensors`."""
        yield from ()

    def finish(self) -> None:
        """Do nothing: `fill_from` fills the parameters."""

    def fill_from(self, source: Int4Tensors) -> None:
        """Keep what a checkpoint's tensors hold, in pairs."""
        numbers = source.numbers()
        pairs, scale, zeros = self._parameters
        pack_pairs(numbers.numbers, pairs)
        scale.copy_(numbers.scale)
        zeros.copy_(numbers.zeros)
        if numbers.order is None:
            self._order = None
        elif self._order is not None:
            self._order.copy_(numbers.order)
        if self.bias is not None and source.bias is not None:
            self.bias.copy_(source.bias)

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield numbers, scales, zeros and what else there is."""
        yield from self._parameters
        yield from (tensor for tensor in (self._order, self.bias) if tensor is not None)

    def permute_rows(self, part: str, order: torch.Tensor) -> None:
        """Give a part's rows another order."""
        start = 0
        for name, count in self._shape.parts.items():
            if name == part:
                for tensor in (*self._parameters, self.bias):
                    if tensor is not None:
                        rows = tensor[start : start + count]
                        rows.copy_(rows[order.to(rows.device)])
            start += count

    def matrix(self) -> torch.Tensor:
        """Return what the weights stand for, in float32."""
        weight = dequantised(self._weights, torch.float32)
        if self._order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self._order, weight)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Return the numbers of rows of words, the lowest bits first: `[rows, 8 * words]` uint8."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


_Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _word_tensors(format: Int4Format, outs: int, ins: int) -> _Tensors:
    """Return the shapes and dtypes of a projection's tensors in AWQ's and GPTQ's layouts."""
    groups = -(-ins // (format.group or ins))
    is_awq = format.layout == "awq"
    words = (ins, -(-outs // _OF_WORD)) if is_awq else (-(-ins // _OF_WORD), outs)
    tensors: _Tensors = {
        "qweight": (words, torch.int32),
        "qzeros": ((groups, -(-outs // _OF_WORD)), torch.int32),
        "scales": ((groups, outs), torch.float32),
    }
    return tensors if is_awq else tensors | {"g_idx": ((ins,), torch.int32)}


def _packed_tensors(format: Int4Format, outs: int, ins: int) -> _Tensors:
    """Return the shapes and dtypes of a projection's tensors that compressed-tensors packed."""
    groups = -(-ins // (format.group or ins))
    tensors: _Tensors = {
        "weight_packed": ((outs, -(-ins // _OF_WORD)), torch.int32),
        "weight_scale": ((outs, groups), torch.float32),
        "weight_shape": ((2,), torch.int64),
    }
    if not format.symmetric:
        tensors["weight_zero_point"] = ((-(-outs // _OF_WORD), groups), torch.int32)
    if format.ordered:
        tensors["weight_g_idx"] = ((ins,), torch.int32)
    return tensors
