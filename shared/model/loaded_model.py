"""The engine's interface of a loaded model, for Pagewire's and transformers' code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from pagewire.shared.model.inputs import ForwardBatch, LayerKv, OnLayerEnd


class CausalLM(Protocol):
    """The methods of a model that a step calls."""

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[LayerKv],
        on_layer_end: OnLayerEnd | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step; returns the final hidden states `[N, hidden]`.

        Args:
            batch: the step's tokens, `[T]`.
            kv: each layer's KV cache; the tokens' keys and values are written there.
            on_layer_end: called with the number of each layer, from 0, in order, once its keys and
                values are written.
            rows: `[N]` int64, the tokens whose hidden states are returned; None for all.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits `[N, vocab]` of hidden states `[N, hidden]`, in `out` if given."""
        ...


class LoadedModel(CausalLM, Protocol):
    """A decoder with its parameters: a `DecoderModel` or a `TransformersModel`."""

    @property
    def embed_tokens(self) -> torch.Tensor:
        """The table of embeddings, `[vocab, hidden]`; of ranks, the part that this one has."""
        ...

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield each parameter on the device once."""
        ...
