"""A model made of transformers' modules, which runs the engine's steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pagewire.shared.model.inputs import ForwardBatch, LayerKv, OnLayerEnd
from pagewire.shared.model.transformers_model.attention import PagedAttention
from pagewire.shared.model.transformers_model.config import TransformersConfig


class _Output:
    """A decoder's output for an output head: hidden states; every other field is None.

    Attributes:
        last_hidden_state: `[1, N, hidden]`.
    """

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Return None: there are no caches, attention weights or losses."""
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(torch.nn.Module):
    """A replacement of the decoder before an output head, which returns its input.

    The head's own code then computes the logits, including scaling and caps.
    """

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        """Return the hidden states `[1, N, hidden]` in the form of a decoder's output."""
        return _Output(inputs_embeds)


class TransformersModel:
    """The whole model, with the interface of `DecoderModel`.

    Attributes:
        config: the model's shape.
        embed_tokens: `[vocab, hidden]`.
        decoder: transformers' module up to the last normalisation.
        attention: the attention function that its layers call.
    """

    def __init__(
        self, config: TransformersConfig, causal_lm: Any, attention: PagedAttention
    ) -> None:
        """Split a model that is ready to run into decoder and output head.

        Args:
            config: the model's shape.
            causal_lm: transformers' `PreTrainedModel` with an output head.
            attention: the attention function that its layers call.
        """
        self.config = config
        self.attention = attention
        self.decoder = causal_lm.base_model
        self.embed_tokens: torch.Tensor = causal_lm.get_input_embeddings().weight
        self._parameters: list[tuple[str, torch.Tensor]] = list(causal_lm.named_parameters())
        setattr(causal_lm, causal_lm.base_model_prefix, _Given())
        self._head = causal_lm

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[LayerKv],
        on_layer_end: OnLayerEnd | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step.

        Args:
            batch: the step's tokens, `[T]`.
            kv: each layer's KV cache; the tokens' keys and values are written there.
            on_layer_end: called with the number of each layer, from 0, once its KV is written.
            rows: `[N]` int64, the tokens whose hidden states are returned; None for all.

        Returns:
            Hidden states after the last normalisation, `[N, hidden]`.
        """
        self.attention.begin(batch, kv, on_layer_end)
        output = self.decoder(
            input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False
        )
        self.attention.end()
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits `[N, vocab]` of hidden states `[N, hidden]`.

        Args:
            hidden: final hidden states.
            out: [N, vocab], to which the logits are written; None allocates it.
        """
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits if out is None else out.copy_(logits)

    def targets(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter, once, by transformers' name for it."""
        yield from self._parameters

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield each parameter on the device once."""
        yield from (parameter for _, parameter in self._parameters)
