"""What a layer keeps of a checkpoint: parameters that a loader fills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

# A checkpoint's tensor name and the part of a parameter that it fills, whose dtype says which
# dtypes the checkpoint's tensor may have: another float dtype is converted.
NamedTarget = tuple[str, torch.Tensor]


class Parameters(Protocol):
    """Parameters of one layer, such as those of a projection."""

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what a checkpoint fills, by names within the layer; call it once to fill them.

        Where the checkpoint's form differs from the form in memory, these are new tensors.
        """
        ...

    def finish(self) -> None:
        """Convert what was filled from the checkpoint's form; call once, after filling."""
        ...

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that stay in memory, each once."""
        ...


# The name of a layer, and parameters that it has.
NamedParameters = tuple[str, Parameters]


def named_targets(parameters: Iterable[NamedParameters]) -> Iterator[NamedTarget]:
    """Yield what a checkpoint fills, by the checkpoint's names."""
    for layer, each in parameters:
        yield from ((join_name(layer, name), target) for name, target in each.targets())


def join_name(layer: str, name: str) -> str:
    """Return a checkpoint's name of what a layer has; the layer's own name may be empty."""
    return f"{layer}.{name}" if layer else name


@dataclass(eq=False, slots=True)
class Plain:
    """One tensor that is stored as a checkpoint has it."""

    name: str
    tensor: torch.Tensor

    def targets(self) -> Iterator[NamedTarget]:
        """Yield the tensor."""
        yield self.name, self.tensor

    def finish(self) -> None:
        """Do nothing: the tensor has its form."""

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the tensor."""
        yield self.tensor
