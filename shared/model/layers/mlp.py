"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagewire.kernels import GatedActivation
from pagewire.shared.model.layers.linear import Linear, NamedTarget


@dataclass(eq=False, slots=True)
class Mlp:
    """`down(activation(gate(x)) * up(x))`."""

    gate_up_proj: Linear
    down_proj: Linear
    gated: GatedActivation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        return self.down_proj.apply(self.gated(self.gate_up_proj.apply(hidden)))

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the projections."""
        yield from self.gate_up_proj.targets(name)
        yield from self.down_proj.targets(name)
