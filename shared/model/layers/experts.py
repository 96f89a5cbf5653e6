"""Mixtures of experts: feed-forward layers, of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagewire.kernels import Ops
from pagewire.kernels.gated_silu import GatedSilu
from pagewire.kernels.routing import Routing
from pagewire.kernels.sigmoid import sigmoid
from pagewire.shared.model.layers.linear import Linear, NamedTarget
from pagewire.shared.model.layers.mlp import Mlp


@dataclass(eq=False, slots=True)
class Experts:
    """The weighted sum of the outputs of each token's experts.

    Attributes:
        router: projects to one logit for each expert.
        gate_up: `[E, 2 I, H]`.
        down: `[E, H, I]`.
        each: names of one expert's gate, up and down projection in the checkpoint, with {} for its
            number; empty if it has all experts in one tensor.
        stacked: names of all experts' gate and up projections, and of their down projections.
        transposed: whether the last two dimensions of stacked weights are swapped.
        gate_up_bias: `[E, 2 I]`, or None.
        down_bias: `[E, H]`, or None.
        correction: `[E]` float32, a bias that affects only the choice of experts, or None.
    """

    ops: Ops
    router: Linear
    routing: Routing
    gate_up: torch.Tensor
    down: torch.Tensor
    each: tuple[str, str, str] | tuple[()]
    stacked: tuple[str, str]
    transposed: bool
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    correction: torch.Tensor | None
    activation: GatedSilu
    interleaved: bool
    wide_router: bool

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        chosen, weights = self.choose(hidden)
        return self.ops.experts(
            hidden,
            chosen,
            weights,
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            self.activation,
            self.interleaved,
        )

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, `[T, K]` int32, and their weights, `[T, K]` float32."""
        logits = self.router.apply(hidden.float() if self.wide_router else hidden)
        return self.ops.route(logits, self.routing, self.correction)

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills router and experts."""
        yield from self.router.targets(name)
        if self.correction is not None:
            yield f"{name}.gate.e_score_correction_bias", self.correction
        if self.each:
            yield from self._each_target(name, self.each)
            return
        gate_up, down = (f"{name}.{part}" for part in self.stacked)
        is_transposed = self.transposed
        yield gate_up, self.gate_up.transpose(1, 2) if is_transposed else self.gate_up
        yield down, self.down.transpose(1, 2) if is_transposed else self.down
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield f"{gate_up}_bias", self.gate_up_bias
            yield f"{down}_bias", self.down_bias

    def _each_target(self, name: str, each: tuple[str, str, str]) -> Iterator[NamedTarget]:
        """Yield what fills each expert's three projections."""
        inner = self.down.shape[2]
        for expert in range(self.down.shape[0]):
            gate, up = self.gate_up[expert].split(inner)
            for part, target in zip(each, (gate, up, self.down[expert]), strict=True):
                yield f"{name}.{part.format(expert)}", target


@dataclass(eq=False, slots=True)
class WithSharedExpert:
    """A mixture and a shared expert: a feed-forward layer that all tokens use in addition.

    Attributes:
        experts: the mixture.
        shared: the feed-forward layer.
        gate: projects to one logit, whose sigmoid multiplies the output of `shared`; None if there
            is none.
    """

    experts: Experts
    shared: Mlp
    gate: Linear | None
    shared_name: str

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        shared = self.shared.forward(hidden)
        if self.gate is not None:
            shared = sigmoid(self.gate.apply(hidden)) * shared
        return self.experts.forward(hidden) + shared

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the mixture, the shared expert and its gate."""
        yield from self.experts.targets(name)
        yield from self.shared.targets(f"{name}.{self.shared_name}")
        if self.gate is not None:
            yield from self.gate.targets(name)
