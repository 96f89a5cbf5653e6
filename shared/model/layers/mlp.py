"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagewire.kernels import Ops
from pagewire.shared.model.layers.linear import Linear, NamedTarget
from pagewire.shared.model.model_config import Activation


class Mlp:
    """`down(activation(gate(x)) * up(x))`."""

    __slots__ = ("_gated", "down_proj", "gate_up_proj")

    def __init__(
        self, gate_up_proj: Linear, down_proj: Linear, ops: Ops, activation: Activation
    ) -> None:
        self._gated = ops.silu_and_mul if activation == "silu" else ops.gelu_and_mul
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        return self.down_proj.apply(self._gated(self.gate_up_proj.apply(hidden)))

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the projections."""
        yield from self.gate_up_proj.targets(name)
        yield from self.down_proj.targets(name)
