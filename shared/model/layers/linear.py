"""Projections, and the methods that store and multiply their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pagewire.kernels import Ops

# A checkpoint's tensor name and the part of a parameter that it fills.
NamedTarget = tuple[str, torch.Tensor]


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

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Project `[T, in_features]` to `[T, sum of the parts]`."""
        return self.ops.linear(x, self.weight, self.bias)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills weight and bias."""
        for kind, parameter in ("weight", self.weight), ("bias", self.bias):
            if parameter is not None:
                rows = torch.split(parameter, list(self.parts.values()))
                yield from ((f"{p}.{kind}", row) for p, row in zip(self.parts, rows, strict=True))
