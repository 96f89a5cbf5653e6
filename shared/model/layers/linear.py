"""Projections, and the methods that store and multiply their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch

from pagewire.kernels import Ops
from pagewire.shared.model.layers.parameters import Method, NamedTarget, WithMethod
from pagewire.shared.model.layers.place import Place
from pagewire.shared.model.shard import Cut, Cuts

Size = int | Cut  # all of a dimension, or the part that this rank has


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Projections of the same input, whatever the format of their weights.

    Attributes:
        in_features: size of the input.
        parts: out features of each projection in the checkpoint, by its name, in order.
        bias: whether each projection has a bias.
        wide: whether the projections are computed in float32.
        pairs: head size of each projection whose heads the checkpoint rotates by neighbours, by its
            name; its rows are reordered so that kernels rotate halves, as for other models.
        is_matrix: whether the weight is also used as a plain matrix, in the model's dtype.
        rows: which part of a projection's out features this rank has, by its name, if not all.
        columns: which part of the in features it has; None: all. Then ranks add up the outputs, and
            the first rank alone adds the bias.
    """

    in_features: int
    parts: Mapping[str, int]
    bias: bool = False
    wide: bool = False
    pairs: Mapping[str, int] = field(default_factory=dict)
    is_matrix: bool = False
    rows: Mapping[str, Cut] = field(default_factory=dict)
    columns: Cut | None = None

    @classmethod
    def of(cls, ins: Size, parts: Mapping[str, Size], **more: Any) -> LinearShape:
        """Return the shape of a rank's part of projections, or of all of them.

        Args:
            ins: size of the input.
            parts: out features of each projection in the checkpoint, by its name, in order.
            more: further attributes.
        """
        rows = {name: size for name, size in parts.items() if _is_cut(size)}
        columns = ins if _is_cut(ins) else None
        sizes = {name: _count(size) for name, size in parts.items()}
        return cls(_count(ins), sizes, rows=rows, columns=columns, **more)

    @property
    def out_features(self) -> int:
        """The sum of the parts' output features."""
        return sum(self.parts.values())

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias, if there is one."""
        return self.columns is None or self.columns.ranges[0][0] == 0

    def empty_bias(self, place: Place) -> torch.Tensor | None:
        """Return a bias that is not filled, or the zeros of a rank that adds none."""
        if not self.bias:
            return None
        bias = place.empty(self.out_features)
        return bias if self.adds_bias else bias.zero_()

    def bias_targets(self, bias: torch.Tensor | None) -> Iterator[NamedTarget]:
        """Yield what fills the parts of a bias `[sum of the parts]`."""
        if bias is None:
            return
        for part, rows in zip(self.parts, bias.split(list(self.parts.values())), strict=True):
            if self.adds_bias:
                yield f"{part}.bias", rows, (self.rows.get(part),)
            else:
                yield f"{part}.bias", rows[:0], (Cut(len(rows), ()),)

    def cuts(self, part: str) -> Cuts:
        """Return which part of a projection's weight `[out, in]` this rank has."""
        return self.rows.get(part), self.columns


def _is_cut(size: Size) -> TypeGuard[Cut]:
    return isinstance(size, Cut) and not size.is_whole


def _count(size: Size) -> int:
    return size.count if isinstance(size, Cut) else size


class HasMatrix(Protocol):
    """Weights that stand for a matrix."""

    def matrix(self) -> torch.Tensor:
        """Return the weight `[sum of the parts, in_features]`; in float32 if it is quantised."""
        ...


class LinearMethod(Method, HasMatrix, Protocol):
    """The parameters of one `Linear` in some format, and how they are multiplied."""

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`, in `out` if given."""
        ...

    def permute_rows(self, part: str, order: torch.Tensor) -> None:
        """Give a part's rows another order: the new row i is the old row `order[i]`."""
        ...


class Linear(WithMethod[LinearMethod]):
    """Projections of the same input, computed as one.

    Attributes:
        shape: names and sizes.
    """

    __slots__ = ("shape",)

    def __init__(self, shape: LinearShape) -> None:
        self.shape = shape

    def finish(self) -> None:
        """Convert the parameters from the checkpoint's form."""
        super().finish()
        for part, head_dim in self.shape.pairs.items():
            rows = torch.arange(self.shape.parts[part]).view(-1, head_dim // 2, 2)
            self.method.permute_rows(part, rows.transpose(1, 2).flatten())


@dataclass(eq=False, slots=True)
class Unquantized:
    """`x @ weight.T + bias` in the model's dtype.

    Attributes:
        shape: names and sizes.
        weight: `[sum of the parts, in_features]`.
        bias: `[sum of the parts]`, or None.
    """

    shape: LinearShape
    weight: torch.Tensor
    bias: torch.Tensor | None
    ops: Ops

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        return self.ops.linear(x, self.weight, self.bias, out)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills weight and bias."""
        parts = self.shape.parts
        for part, rows in zip(parts, self.weight.split(list(parts.values())), strict=True):
            yield f"{part}.weight", rows, self.shape.cuts(part)
        yield from self.shape.bias_targets(self.bias)

    def finish(self) -> None:
        """Do nothing: weights are stored as a checkpoint has them."""

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield weight and bias as they are on the device."""
        yield self.weight
        if self.bias is not None:
            yield self.bias

    def permute_rows(self, part: str, order: torch.Tensor) -> None:
        """Give a part's rows another order."""
        for name, rows, *_ in self.targets():
            if name.rpartition(".")[0] == part:
                rows.copy_(rows[order.to(rows.device)])

    def matrix(self) -> torch.Tensor:
        """Return the weight, which needs no conversion."""
        return self.weight

    def fill_from(self, source: HasMatrix) -> None:
        """Take what the weights of another method, without a bias, stand for."""
        self.weight.copy_(source.matrix())


class SeparateLinears:
    """Projections of the same input in different formats, computed one after the other.

    Args:
        linears: each projection, by its name in the checkpoint, in order.
    """

    __slots__ = ("_linears",)

    def __init__(self, linears: Mapping[str, Linear]) -> None:
        self._linears = linears

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        y = torch.cat([linear.apply(x) for linear in self._linears.values()], dim=1)
        return y if out is None else out.copy_(y)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield the tensors of all projections that a checkpoint fills."""
        for linear in self._linears.values():
            yield from linear.targets()

    def finish(self) -> None:
        """Convert the projections from the checkpoint's form."""
        for linear in self._linears.values():
            linear.finish()

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of all projections as they are on the device."""
        for linear in self._linears.values():
            yield from linear.stored()

    def permute_rows(self, part: str, order: torch.Tensor) -> None:
        """Give a projection's rows another order."""
        self._linears[part].method.permute_rows(part, order)

    def matrix(self) -> torch.Tensor:
        """Return the weights one after the other, in float32."""
        return torch.cat([linear.method.matrix().float() for linear in self._linears.values()])
