"""Counts the distinct experts that the tokens of a step choose in each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.layers.experts import Experts, WithSharedExpert


@dataclass(frozen=True, slots=True)
class _Counted:
    """A mixture that notes, at each call, how many experts its tokens choose."""

    experts: Experts
    counts: list[int]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.counts.append(self.experts.choose(hidden)[0].unique().numel())
        return self.experts.forward(hidden)


@contextmanager
def counting_experts(runner: ModelRunner) -> Iterator[list[int]]:
    """Launch decode steps without CUDA graphs, and count the experts of each layer in each step.

    Yields:
        The counts, in the order of the layers that have experts.
    """
    layers: Sequence[Any] = runner.model.layers if isinstance(runner.model, DecoderModel) else []
    mixtures = [layer for layer in layers if isinstance(layer.mlp, Experts)]
    shared: list[Any] = [layer.mlp for layer in layers if isinstance(layer.mlp, WithSharedExpert)]
    counts: list[int] = []
    for layer in mixtures:
        layer.mlp = _Counted(layer.mlp, counts)
    for mixture in shared:
        mixture.experts = _Counted(mixture.experts, counts)
    graphs, runner.decode_graphs = runner.decode_graphs, None
    try:
        yield counts
    finally:
        runner.decode_graphs = graphs
        for layer in mixtures:
            layer.mlp = layer.mlp.experts
        for mixture in shared:
            mixture.experts = mixture.experts.experts
