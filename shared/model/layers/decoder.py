"""Decoder layers, and the model made of them.

The residual stream is separate from the hidden states: each normalisation adds them, so that a
layer is a plain list of fused operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from pagewire.shared.model.inputs import ForwardBatch, LayerKv, OnLayerEnd
from pagewire.shared.model.layers.attention import Attention
from pagewire.shared.model.layers.experts import Experts, WithSharedExpert
from pagewire.shared.model.layers.latent_attention import LatentAttention
from pagewire.shared.model.layers.linear import Linear
from pagewire.shared.model.layers.mlp import Mlp
from pagewire.shared.model.layers.norm import Norm
from pagewire.shared.model.layers.parameters import (
    NamedParameters,
    PlainTensor,
    named_targets,
)
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.shard import Communicator, Cut

# Attention maps `[T, hidden]` to `[N, hidden]`, writing to `kv_cache`; see `LayerKv.cache`. A
# feed-forward layer maps each token independently.
AttentionPart: TypeAlias = "Attention | LatentAttention | SummedOverRanks | ScaledOutput"
TokenPart: TypeAlias = "Mlp | Experts | WithSharedExpert | SummedOverRanks | ScaledOutput"


@dataclass(eq=False, slots=True)
class SummedOverRanks:
    """Attention or a feed-forward layer, of which each rank computes a part of the sum."""

    part: AttentionPart | TokenPart
    communicator: Communicator

    def forward(self, hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        """Map hidden states as the part does, on all ranks together."""
        return self.communicator.reduce(self.part.forward(hidden, *more))

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield the parameters of the wrapped part."""
        yield from self.part.parameters(name)


@dataclass(eq=False, slots=True)
class ScaledOutput:
    """Attention or a feed-forward layer whose output is multiplied."""

    part: AttentionPart | TokenPart
    multiplier: float

    def forward(self, hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        """Map hidden states as the part does."""
        return self.part.forward(hidden, *more).mul_(self.multiplier)

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield the parameters of the wrapped part."""
        yield from self.part.parameters(name)


@dataclass(eq=False, slots=True)
class PreNormLayer:
    """Attention and feed-forward, each after a normalisation, which may add up the ranks' parts."""

    input_norm: Norm
    attention: AttentionPart
    post_attention_norm: Norm
    mlp: TokenPart
    mlp_name: str  # name of `mlp` in the checkpoint

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and residual stream, `[N, hidden]`, not yet added together."""
        hidden, residual = self.input_norm(hidden, residual)
        hidden = self.attention.forward(hidden, batch, kv_cache)
        hidden, residual = self.post_attention_norm(hidden, batch.kept(residual))
        return self.mlp.forward(hidden), residual

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield those of norms, attention and feed-forward layer."""
        yield f"{name}.input_layernorm", self.input_norm
        yield from self.attention.parameters(f"{name}.self_attn")
        yield f"{name}.post_attention_layernorm", self.post_attention_norm
        yield from self.mlp.parameters(f"{name}.{self.mlp_name}")


@dataclass(eq=False, slots=True)
class PostNormLayer:
    """Attention and feed-forward, whose outputs are normalised before they are added."""

    attention: AttentionPart
    post_attention_norm: Norm
    mlp: TokenPart
    post_mlp_norm: Norm

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Return the hidden states `[N, hidden]`, complete."""
        hidden = batch.kept(hidden) + self.post_attention_norm(
            self.attention.forward(hidden, batch, kv_cache)
        )[0]  # fmt: skip
        return hidden + self.post_mlp_norm(self.mlp.forward(hidden))[0], None

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield those of norms, attention and feed-forward layer."""
        yield from self.attention.parameters(f"{name}.self_attn")
        yield f"{name}.post_attention_layernorm", self.post_attention_norm
        yield from self.mlp.parameters(f"{name}.mlp")
        yield f"{name}.post_feedforward_layernorm", self.post_mlp_norm


@dataclass(eq=False, slots=True)
class SandwichLayer:
    """Attention and feed-forward, each between two normalisations."""

    input_norm: Norm
    attention: AttentionPart
    post_attention_norm: Norm
    pre_mlp_norm: Norm
    mlp: TokenPart
    post_mlp_norm: Norm

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and residual stream, `[N, hidden]`, not yet added together."""
        hidden, residual = self.input_norm(hidden, residual)
        hidden = self.attention.forward(hidden, batch, kv_cache)
        hidden = self.post_attention_norm(hidden)[0]
        hidden, residual = self.pre_mlp_norm(hidden, batch.kept(residual))
        return self.post_mlp_norm(self.mlp.forward(hidden))[0], residual

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield those of norms, attention and feed-forward layer."""
        yield f"{name}.input_layernorm", self.input_norm
        yield from self.attention.parameters(f"{name}.self_attn")
        yield f"{name}.post_attention_layernorm", self.post_attention_norm
        yield f"{name}.pre_feedforward_layernorm", self.pre_mlp_norm
        yield from self.mlp.parameters(f"{name}.mlp")
        yield f"{name}.post_feedforward_layernorm", self.post_mlp_norm


@dataclass(eq=False, slots=True)
class ParallelLayer:
    """Attention and feed-forward in parallel, after one normalisation."""

    input_norm: Norm
    attention: AttentionPart
    mlp: TokenPart
    communicator: Communicator | None  # adds up both parts of all ranks at once

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
        output = self.mlp.forward(batch.kept(hidden))
        if self.communicator is not None:
            return self.communicator.reduce(output + attended), batch.kept(residual)
        return output, batch.kept(residual) + attended

    def parameters(self, name: str) -> Iterator[NamedParameters]:
        """Yield those of norms, attention and feed-forward layer."""
        yield f"{name}.input_layernorm", self.input_norm
        yield from self.attention.parameters(f"{name}.self_attn")
        yield from self.mlp.parameters(f"{name}.mlp")


# Maps hidden states `[T, hidden]` to `[N, hidden]`, see `ForwardBatch.kept_rows`, and to the
# residual stream to add to them, if any.
DecoderLayer = PreNormLayer | PostNormLayer | SandwichLayer | ParallelLayer


@dataclass(eq=False, slots=True)
class DecoderModel:
    """The whole model, its parameters uninitialised until a loader has filled `targets()`.

    Attributes:
        config: the model's shape.
        layers: the decoder layers, in order.
        embed_tokens: `[vocab, hidden]`, or the part of these tokens that this rank has.
        tokens: this part.
        lm_head: projects to logits; its weight is `embed_tokens` if they are tied.
        norm: the normalisation of the last layer's output.
        embedding_multiplier: factor of the embeddings.
        communicator: of the ranks, each with its part of the tokens; None: the model is whole.
        norms_add_up: whether norms add up the ranks' parts of embeddings and of layers' outputs.
    """

    config: ModelConfig
    embed_tokens: torch.Tensor
    tokens: Cut
    layers: Sequence[DecoderLayer]
    norm: Norm
    lm_head: Linear
    embedding_multiplier: float
    communicator: Communicator | None = None
    norms_add_up: bool = False

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[LayerKv],
        on_layer_end: OnLayerEnd | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step.

        The last layer's output projection and feed-forward layer, which need no other token, are
        computed for `rows` alone.

        Args:
            batch: the step's tokens, `[T]`.
            kv: each layer's KV cache; the tokens' keys and values are written there.
            on_layer_end: called with the number of each layer, from 0, in order, once its work is
                launched.
            rows: `[N]` int64, the tokens whose hidden states are returned; None for all.

        Returns:
            Hidden states after the last normalisation, `[N, hidden]`.
        """
        hidden = self._embedded(batch.input_ids)
        if self.embedding_multiplier != 1.0:
            hidden.mul_(self.embedding_multiplier)
        residual: torch.Tensor | None = None
        groups, last = batch.groups, len(self.layers) - 1
        for index, (layer, (group, cache)) in enumerate(zip(self.layers, kv, strict=True)):
            of_layer = groups[group]
            if index == last and rows is not None:
                of_layer = replace(of_layer, kept_rows=rows)
            hidden, residual = layer.forward(hidden, residual, of_layer, cache)
            if on_layer_end is not None:
                on_layer_end(index)
        return self.norm(hidden, residual)[0]

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings `[T, hidden]` of tokens `[T]`, or this rank's part of them."""
        if self.communicator is None:
            return F.embedding(token_ids, self.embed_tokens)
        rows = token_ids - self.tokens.ranges[0][0]
        is_other = (rows < 0) | (rows >= self.tokens.count)
        hidden = F.embedding(rows.masked_fill(is_other, 0), self.embed_tokens)
        hidden.masked_fill_(is_other[:, None], 0.0)
        return hidden if self.norms_add_up else self.communicator.reduce(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits `[N, vocab]` of hidden states `[N, hidden]`, in the model's dtype.

        Args:
            hidden: final hidden states.
            out: [N, vocab], to which the logits are written; None allocates it.
        """
        if self.communicator is None:
            logits = self.lm_head.apply(hidden, out)
        else:
            logits = self.communicator.gather(self.lm_head.apply(hidden))
            logits = logits if out is None else out.copy_(logits)
        if self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        cap = self.config.logits_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def sections(self) -> Iterator[list[NamedParameters]]:
        """Yield the parameters of the embedding, of each layer, and of what follows."""
        yield [
            ("model.embed_tokens", PlainTensor("weight", self.embed_tokens, (self.tokens, None)))
        ]
        for index, layer in enumerate(self.layers):
            yield list(layer.parameters(f"model.layers.{index}"))
        last: list[NamedParameters] = [("model.norm", self.norm)]
        yield last if self.config.tie_word_embeddings else [*last, ("", self.lm_head)]

    def parameters(self) -> Iterator[NamedParameters]:
        """Yield all parameters with the names of their layers."""
        for section in self.sections():
            yield from section

    def targets(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every checkpoint tensor's name and what it fills; see `Parameters.targets`."""
        yield from ((target.name, target.tensor) for target in named_targets(self.parameters()))

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that stay in memory, each once."""
        for _, parameter in self.parameters():
            yield from parameter.stored()
