"""Parameters of a layer: the tensors that a checkpoint fills, and their names there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from pagewire.shared.model.shard import Cuts


class TensorTarget(NamedTuple):
    """A part of a parameter, and the checkpoint's tensor that fills it.

    Attributes:
        name: of the checkpoint's tensor.
        tensor: the part of a parameter that it fills, whose dtype says which dtypes the
            checkpoint's tensor may have: another float dtype is converted.
        cuts: which part of the checkpoint's tensor fills it.
    """

    name: str
    tensor: torch.Tensor
    cuts: Cuts = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        sizes = list(self.tensor.shape)
        for dim, cut in enumerate(self.cuts):
            sizes[dim] = sizes[dim] if cut is None else cut.size
        return tuple(sizes)


# The same within a layer; no cuts: all of the checkpoint's tensor.
NamedTarget = tuple[str, torch.Tensor] | tuple[str, torch.Tensor, Cuts]


class Parameters(Protocol):
    """Parameters of one layer, such as those of a projection."""

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what a checkpoint fills, by names within the layer; call it once to fill them.

        Where the checkpoint's form differs from the form in memory, these are new tensors.
        """
        ...

    def finish(self) -> None:
        """Convert what was filled, if the checkpoint has another form; call once, after filling."""
        return

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that stay in memory, each once: by default those that are filled."""
        for _, tensor, *_ in self.targets():
            yield tensor


# The name of a layer, and parameters that it has.
NamedParameters = tuple[str, Parameters]


def named_targets(parameters: Iterable[NamedParameters]) -> Iterator[TensorTarget]:
    """Yield what a checkpoint fills, by the checkpoint's names."""
    for layer, parameter in parameters:
        for name, *rest in parameter.targets():
            yield TensorTarget(join_name(layer, name), *rest)


def join_name(layer: str, name: str) -> str:
    """Return a checkpoint's name of what a layer has; the layer's own name may be empty."""
    return f"{layer}.{name}" if layer else name


@dataclass(eq=False, slots=True)
class PlainTensor(Parameters):
    """A tensor that is stored as a checkpoint has it."""

    name: str
    tensor: torch.Tensor
    cuts: Cuts = ()

    def targets(self) -> Iterator[NamedTarget]:
        """Yield the tensor and its name, for the checkpoint to fill."""
        yield self.name, self.tensor, self.cuts


class Method(Parameters, Protocol):
    """Parameters in some format, and how they are multiplied."""

    @property
    def apply(self) -> Callable[..., torch.Tensor]:
        """The function that multiplies inputs with the parameters."""
        ...


MethodT = TypeVar("MethodT", bound=Method)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How parameters of another format become those of a method, layer by layer.

    Attributes:
        source: makes a method of the format that the checkpoint has.
        fill: fills the method's own parameters from it.
    """

    source: Callable[[], Any]
    fill: Callable[[Any], None]


class WithMethod(Generic[MethodT]):
    """A layer whose parameters may have several formats.

    Attributes:
        method: owns the parameters; chosen when the model's layers have names, since a checkpoint
            says by name what is quantised.
        apply: the method's function itself, which saves four calls per layer and step.
    """

    __slots__ = ("_conversion", "_filled", "apply", "method")

    def use(self, method: MethodT, conversion: Conversion | None = None) -> None:
        """Take the method that owns the parameters, whose format may not be the checkpoint's."""
        self.method = method
        self.apply = method.apply
        self._conversion = conversion
        self._filled: MethodT | None = None

    def targets(self) -> Iterator[NamedTarget]:
        """Yield the tensors that the checkpoint fills, in the checkpoint's format."""
        if self._conversion is not None:
            self._filled = self._conversion.source()
        yield from (self._filled or self.method).targets()

    def finish(self) -> None:
        """Convert the parameters from the checkpoint's form."""
        if self._conversion is None or self._filled is None:
            self.method.finish()
        else:
            self._filled.finish()
            self._conversion.fill(self._filled)
            self._filled = None

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that stay in memory."""
        yield from self.method.stored()
