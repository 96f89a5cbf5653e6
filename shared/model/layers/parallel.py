"""Layers whose attention and feed-forward layer have the same input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagewire.shared.model.inputs import ForwardBatch
from pagewire.shared.model.layers.decoder import AttentionPart, TokenPart
from pagewire.shared.model.layers.linear import NamedTarget
from pagewire.shared.model.layers.norm import Norm


@dataclass(eq=False, slots=True)
class ParallelLayer:
    """Attention and feed-forward in parallel, after one normalisation."""

    input_norm: Norm
    attention: AttentionPart
    mlp: TokenPart

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and residual stream, `[N, hidden]`, not yet added together."""
        hidden, residual = self.input_norm(hidden, residual)
        attended = self.attention.forward(hidden, batch, kv_cache)
        return self.mlp.forward(batch.kept(hidden)), batch.kept(residual) + attended

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the layer."""
        yield from self.input_norm.targets(f"{name}.input_layernorm")
        yield from self.attention.targets(f"{name}.self_attn")
        yield from self.mlp.targets(f"{name}.mlp")
