"""Mixtures of experts: feed-forward layers, of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagewire.kernels import Ops
from pagewire.kernels.gated_silu import SILU, GatedSilu
from pagewire.kernels.routing import Routing
from pagewire.kernels.sigmoid import sigmoid
from pagewire.shared.model.layers.linear import Linear, NamedTarget
from pagewire.shared.model.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the weights in a checkpoint, after the name of the mixture.

    Attributes:
        each: names of one expert's gate, up and down projection, with {} for its number; empty if
            the checkpoint has all experts in one tensor.
        stacked: names of all experts' gate and up projections, [E, 2 I, H], and down, [E, H, I].
        transposed: whether the last two dimensions of stacked weights are swapped.
    """

    each: tuple[str, str, str] | tuple[()] = ()
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    transposed: bool = False


class Experts:
    """The weighted sum of the outputs of each token's experts.

    Attributes:
        router: projects to one logit for each expert.
        gate_up: `[E, 2 I, H]`.
        down: `[E, H, I]`.
        gate_up_bias: `[E, 2 I]`, or None.
        down_bias: `[E, H]`, or None.
        correction: `[E]` float32, a bias that affects only the choice of experts, or None.
    """

    __slots__ = (
        "_activation",
        "_interleaved",
        "_names",
        "_op",
        "_route",
        "_routing",
        "_wide_router",
        "correction",
        "down",
        "down_bias",
        "gate_up",
        "gate_up_bias",
        "router",
    )

    def __init__(
        self,
        ops: Ops,
        router: Linear,
        routing: Routing,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        names: ExpertNames,
        *,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        correction: torch.Tensor | None = None,
        activation: GatedSilu = SILU,
        interleaved: bool = False,
        wide_router: bool = False,
    ) -> None:
        self._op = ops.experts
        self._route = ops.route
        self._routing = routing
        self._names = names
        self._activation = activation
        self._interleaved = interleaved
        self._wide_router = wide_router
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.gate_up_bias = None if biases is None else biases[0]
        self.down_bias = None if biases is None else biases[1]
        self.correction = correction

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        chosen, weights = self.choose(hidden)
        return self._op(
            hidden,
            chosen,
            weights,
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            self._activation,
            self._interleaved,
        )

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, `[T, K]` int32, and their weights, `[T, K]` float32."""
        logits = self.router.apply(hidden.float() if self._wide_router else hidden)
        return self._route(logits, self._routing, self.correction)

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills router and experts."""
        yield from self.router.targets(name)
        if self.correction is not None:
            yield f"{name}.gate.e_score_correction_bias", self.correction
        if self._names.each:
            yield from self._each_target(name, self._names.each)
            return
        gate_up, down = (f"{name}.{part}" for part in self._names.stacked)
        is_transposed = self._names.transposed
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


class WithSharedExpert:
    """A mixture and a shared expert: a feed-forward layer that all tokens use in addition.

    Attributes:
        experts: the mixture.
        shared: the feed-forward layer.
        gate: projects to one logit, whose sigmoid multiplies the output of `shared`; None if there
            is none.
    """

    __slots__ = ("_shared_name", "experts", "gate", "shared")

    def __init__(
        self, experts: Experts, shared: Mlp, gate: Linear | None, shared_name: str
    ) -> None:
        self.experts = experts
        self.shared = shared
        self.gate = gate
        self._shared_name = shared_name

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        shared = self.shared.forward(hidden)
        if self.gate is not None:
            shared = sigmoid(self.gate.apply(hidden)) * shared
        return self.experts.forward(hidden) + shared

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the mixture, the shared expert and its gate."""
        yield from self.experts.targets(name)
        yield from self.shared.targets(f"{name}.{self._shared_name}")
        if self.gate is not None:
            yield from self.gate.targets(name)
