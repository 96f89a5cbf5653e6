"""Mixtures of experts: feed-forward layers, of which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from pagewire.kernels import Ops
from pagewire.kernels.gated_silu import GatedSilu
from pagewire.kernels.routing import Routing
from pagewire.kernels.sigmoid import sigmoid
from pagewire.shared.model.layers.linear import Linear
from pagewire.shared.model.layers.mlp import Mlp
from pagewire.shared.model.layers.parameters import (
    Method,
    NamedParameters,
    NamedTarget,
    PlainTensor,
    WithMethod,
)
from pagewire.shared.model.shard import Cut


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of a mixture, whatever the format of their weights.

    Attributes:
        count: number of experts, E.
        hidden: size of their input and output, H.
        inner: intermediate size of one, I.
        each: names of one expert's gate, up and down projection in the checkpoint, with {} for its
            number; empty if it has all experts in one tensor.
        stacked: names of all experts' gate and up projections, and of their down projections.
        transposed: whether the last two dimensions of stacked weights are swapped.
        biases: whether the projections have biases; only with stacked weights.
        interleaved: whether rows of gate and up alternate.
        activation: the activation between an expert's projections.
        cut: the part of the intermediate size that this rank has; None: all. Then ranks add up the
            outputs, and the first rank alone adds the biases of down projections.
    """

    count: int
    hidden: int
    inner: int
    each: tuple[str, str, str] | tuple[()]
    stacked: tuple[str, str]
    transposed: bool
    biases: bool
    interleaved: bool
    activation: GatedSilu
    cut: Cut | None = None

    @property
    def gate_up_cut(self) -> Cut | None:
        """The part of the rows of stacked gate and up projections that this rank has."""
        if self.cut is None:
            return None
        return self.cut.times(2) if self.interleaved else Cut.joined((self.cut, self.cut))

    def bias_targets(
        self, gate_up: torch.Tensor | None, down: torch.Tensor | None
    ) -> Iterator[NamedTarget]:
        """Yield what fills biases `[E, 2 I]` and `[E, H]`, the latter zeros before."""
        if gate_up is None or down is None:
            return
        names = [f"{name}_bias" for name in self.stacked]
        yield names[0], gate_up, (None, self.gate_up_cut)
        if self.cut is None or self.cut.ranges[0][0] == 0:
            yield names[1], down
        else:  # stays zeros, as that of the first rank is added
            yield names[1], down[:, :0], (None, Cut(self.hidden, ()))


class ExpertsMethod(Method, Protocol):
    """The parameters of a mixture's experts in some format, and how they are computed."""

    def apply(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, `[T, H]`.

        Args:
            x: `[T, H]`.
            chosen: each token's experts, `[T, K]` int32.
            weights: of their outputs, `[T, K]` float32.
        """
        ...


@dataclass(eq=False, slots=True)
class UnquantizedExperts:
    """Experts in the model's dtype.

    Attributes:
        gate_up: `[E, 2 I, H]`.
        down: `[E, H, I]`.
        gate_up_bias: `[E, 2 I]`, or None.
        down_bias: `[E, H]`, or None.
    """

    shape: ExpertsShape
    ops: Ops
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def apply(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        return self.ops.experts(
            x,
            chosen,
            weights,
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            self.shape.activation,
            self.shape.interleaved,
        )

    def targets(self) -> Iterator[NamedTarget]:
        """Yield what fills the weights and biases."""
        if self.shape.each:
            yield from self._each_target(self.shape.each)
            return
        shape = self.shape
        gate_up, down = shape.stacked
        rows, columns = shape.gate_up_cut, shape.cut
        if shape.transposed:
            yield gate_up, self.gate_up.transpose(1, 2), (None, None, rows)
            yield down, self.down.transpose(1, 2), (None, columns, None)
        else:
            yield gate_up, self.gate_up, (None, rows, None)
            yield down, self.down, (None, None, columns)
        yield from shape.bias_targets(self.gate_up_bias, self.down_bias)

    def _each_target(self, each: tuple[str, str, str]) -> Iterator[NamedTarget]:
        """Yield what fills each expert's three projections."""
        cut = self.shape.cut
        for expert in range(self.shape.count):
            gate, up = self.gate_up[expert].split(self.shape.inner)
            gate_name, up_name, down_name = (f"{part.format(expert)}.weight" for part in each)
            yield gate_name, gate, (cut, None)
            yield up_name, up, (cut, None)
            yield down_name, self.down[expert], (None, cut)

    def finish(self) -> None:
        """Do nothing: weights are stored as a checkpoint has them."""

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the weights and biases as they are on the device."""
        for tensor in (self.gate_up, self.down, self.gate_up_bias, self.down_bias):
            if tensor is not None:
                yield tensor


class ExpertWeights(WithMethod[ExpertsMethod]):
    """The experts of a mixture.

    Attributes:
        shape: names and sizes.
    """

    __slots__ = ("shape",)

    def __init__(self, shape: ExpertsShape) -> None:
        self.shape = shape


@dataclass(eq=False, slots=True)
class Experts:
    """The weighted sum of the outputs of each token's experts.

    Attributes:
        router: projects to one logit for each expert.
        routing: the rule by which a token's experts are chosen.
        weights: the experts.
        correction: `[E]` float32, a bias that affects only the choice of experts, or None.
        wide_router: whether the router's logits are computed in float32.
    """

    ops: Ops
    router: Linear
    routing: Routing
    weights: ExpertWeights
    correction: torch.Tensor | None
    wide_router: bool

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        return self.weights.apply(hidden, *self.choose(hidden))

    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts, `[T, K]` int32, and their weights, `[T, K]` float32."""
        logits = self.router.apply(hidden.float() if self.wide_router else hidden)
        return self.ops.route(logits, self.routing, self.correction)

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield router and experts with their names in the checkpoint."""
        yield name, self.router
        if self.correction is not None:
            yield name, PlainTensor("gate.e_score_correction_bias", self.correction)
        yield name, self.weights


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

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield those of the mixture, of the shared expert and of its gate."""
        yield from self.experts.parameters(name)
        yield from self.shared.parameters(f"{name}.{self.shared_name}")
        if self.gate is not None:
            yield name, self.gate
