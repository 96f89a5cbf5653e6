"""Projections, and the methods that store and multiply their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pagewire.kernels import Ops

# A checkpoint's tensor name and the part of a parameter that it fills.
NamedTarget = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The shape of projections.

    Attributes:
        in_features: size of the input of all projections.
        parts: out features of each projection in the checkpoint, by its name, in order.
        bias: whether each projection has a bias.
    """

    in_features: int
    parts: Mapping[str, int]
    bias: bool


class LinearMethod(Protocol):
    """The parameters of one `Linear` in some format, and how they are multiplied."""

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills the parameters, by names such as `q_proj.weight`."""
        ...

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        ...


class Linear:
    """Projections of the same input, computed as one.

    Attributes:
        method: owns the parameters.
        apply: projects `[T, in_features]` to `[T, sum of the parts]`; it is the method's function
            itself, which saves four calls per layer and step.
    """

    __slots__ = ("apply", "method")

    def __init__(self, method: LinearMethod) -> None:
        self.method = method
        self.apply = method.apply

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the parameters; `name` is the name of the layer that has them."""
        yield from ((f"{name}.{part}", target) for part, target in self.method.targets())


class Unquantized:
    """`x @ weight.T + bias` in the model's dtype.

    Attributes:
        weight: `[sum of the parts, in_features]`.
        bias: `[sum of the parts]`, or None.
    """

    __slots__ = ("_op", "_parts", "bias", "weight")

    def __init__(
        self, shape: LinearShape, ops: Ops, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._op = ops.linear
        self._parts = shape.parts
        rows = sum(shape.parts.values())
        self.weight = torch.empty(rows, shape.in_features, device=device, dtype=dtype)
        self.bias = torch.empty(rows, device=device, dtype=dtype) if shape.bias else None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        return self._op(x, self.weight, self.bias)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills weight and bias."""
        for kind, parameter in ("weight", self.weight), ("bias", self.bias):
            if parameter is not None:
                rows = torch.split(parameter, list(self._parts.values()))
                yield from ((f"{p}.{kind}", row) for p, row in zip(self._parts, rows, strict=True))
