"""The gated feed-forward layer of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagewire.kernels import GatedActivation
from pagewire.shared.model.layers.linear import Linear
from pagewire.shared.model.layers.parameters import NamedParameters


@dataclass(eq=False, slots=True)
class Mlp:
    """Computes `down(activation(gate(x)) * up(x))` of each token."""

    gate_up_proj: Linear
    down_proj: Linear
    gated: GatedActivation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        return self.down_proj.apply(self.gated(self.gate_up_proj.apply(hidden)))

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield the projections with their names in the checkpoint."""
        yield name, self.gate_up_proj
        yield name, self.down_proj
