"""Projections, and the methods that store and multiply their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pagewire.kernels import Ops
from pagewire.shared.model.layers.parameters import Method, NamedTarget, WithMethod


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
    """

    in_features: int
    parts: Mapping[str, int]
    bias: bool = False
    wide: bool = False
    pairs: Mapping[str, int] = field(default_factory=dict)
    is_matrix: bool = False

    @property
    def out_features(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


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
        parts: out features of each projection in the checkpoint, by its name, in order.
        weight: `[sum of the parts, in_features]`.
        bias: `[sum of the parts]`, or None.
    """

    parts: Mapping[str, int]
    weight: torch.Tensor
    bias: torch.Tensor | None
    ops: Ops

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        return self.ops.linear(x, self.weight, self.bias, out)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills weight and bias."""
        for kind, parameter in ("weight", self.weight), ("bias", self.bias):
            if parameter is not None:
                rows = torch.split(parameter, list(self.parts.values()))
                yield from ((f"{p}.{kind}", row) for p, row in zip(self.parts, rows, strict=True))

    def finish(self) -> None:
        """Do nothing: weights are stored as a checkpoint has them."""

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield weight and bias."""
        yield self.weight
        if self.bias is not None:
            yield self.bias

    def permute_rows(self, part: str, order: torch.Tensor) -> None:
        """Give a part's rows another order."""
        for name, rows in self.targets():
            if name.rpartition(".")[0] == part:
                rows.copy_(rows[order.to(rows.device)])

    def matrix(self) -> torch.Tensor:
        """Return the weight itself."""
        return self.weight

    def take(self, source: HasMatrix) -> None:
        """Take what the weights of another method, without a bias, stand for."""
        self.weight.copy_(source.matrix())


class Separate:
    """Projections of the same input in different formats, computed one after the other.

    Args:
        linears: each projection, by its name in the checkpoint, in order.
    """

    __slots__ = ("_linears",)

    def __init__(self, linears: Mapping[str, Linear]) -> None:
        self._linears = linears

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        y = torch.cat([each.apply(x) for each in self._linears.values()], dim=1)
        return y if out is None else out.copy_(y)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills the projections."""
        for each in self._linears.values():
            yield from each.targets()

    def finish(self) -> None:
        """Convert the projections from the checkpoint's form."""
        for each in self._linears.values():
            each.finish()

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the projections' tensors."""
        for each in self._linears.values():
            yield from each.stored()

    def permute_rows(self, part: str, order: torch.Tensor) -> None:
        """Give a projection's rows another order."""
        self._linears[part].method.permute_rows(part, order)

    def matrix(self) -> torch.Tensor:
        """Return the weights one after the other, in float32."""
        return torch.cat([each.method.matrix().float() for each in self._linears.values()])
