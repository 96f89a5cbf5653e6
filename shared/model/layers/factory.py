"""Makes the layers of one model: on one device, in one dtype, with one set of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pagewire.kernels import Ops
from pagewire.shared.model.layers.attention import Attention, QkNorm
from pagewire.shared.model.layers.decoder import (
    AttentionPart,
    DecoderLayer,
    DecoderModel,
    PostNormLayer,
    PreNormLayer,
    TokenPart,
)
from pagewire.shared.model.layers.linear import Linear, LinearShape, Unquantized
from pagewire.shared.model.layers.mlp import Mlp
from pagewire.shared.model.layers.norm import RmsNorm
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.rope import cos_sin_table


class LayerFactory:
    """What a family composes its model of; parameters are allocated, not filled.

    A family's file calls this object alone, so that it imports no torch.

    Args:
        device: for the parameters; on "meta" they take no memory.
        dtype: of parameters and activations.
        ops: kernels that suit the device.
        max_positions: longest sequence.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, ops: Ops, max_positions: int
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._ops = ops
        self._max_positions = max_positions

    def linear(self, in_features: int, parts: Mapping[str, int], bias: bool) -> Linear:
        """Return projections of one input; see `LinearShape`."""
        shape = LinearShape(in_features, parts, bias)
        return Linear(Unquantized(shape, self._ops, self._device, self._dtype))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def norm(self, size: int, eps: float) -> RmsNorm:
        """Return a normalisation of rows of `size` numbers."""
        return RmsNorm(size, eps, self._ops, self._device, self._dtype)

    def cos_sin(self, config: ModelConfig) -> torch.Tensor:
        """Return the table of rotary angles, for all attention layers that use it."""
        table = cos_sin_table(config.rope, config.head_dim, self._max_positions)
        return table.to(self._device)

    def attention(
        self,
        config: ModelConfig,
        cos_sin: torch.Tensor | None,
        *,
        qk_norm: QkNorm = "none",
        scale: float | None = None,
        fused: bool = False,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
    ) -> Attention:
        """Return attention over the paged KV cache.

        Args:
            config: heads, sizes, biases.
            cos_sin: see `cos_sin`; None rotates nothing.
            qk_norm: what of queries and keys is normalised.
            scale: of the scores; None: the inverse root of the head size.
            fused: whether the checkpoint has one tensor `qkv_proj`.
            window: of positions that a query attends to, its own included; None for all.
            soft_cap: of the scores, or None.
            sinks: whether each head has one.
        """
        q, kv = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
        parts = {"qkv_proj": q + 2 * kv} if fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        norms = None
        if qk_norm != "none":
            sizes = (config.head_dim,) * 2 if qk_norm == "head" else (q, kv)
            norms = (
                self.norm(sizes[0], config.rms_norm_eps),
                self.norm(sizes[1], config.rms_norm_eps),
            )
        return Attention(
            config,
            self._ops,
            self.linear(config.hidden_size, parts, config.qkv_bias),
            self.linear(q, {"o_proj": config.hidden_size}, config.o_bias),
            cos_sin,
            config.head_dim**-0.5 if scale is None else scale,
            qk_norm,
            norms,
            window,
            soft_cap,
            self._empty(config.num_heads) if sinks else None,
        )

    def mlp(self, config: ModelConfig, *, fused: bool = False) -> Mlp:
        """Return a gated feed-forward layer; `fused`: the checkpoint has one `gate_up_proj`."""
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
        return Mlp(
            self.linear(hidden, parts, bias),
            self.linear(inner, {"down_proj": hidden}, bias),
            self._ops,
        )

    def pre_norm_layer(
        self, config: ModelConfig, attention: AttentionPart, mlp: TokenPart
    ) -> PreNormLayer:
        """Return a layer that normalises before attention and before the feed-forward layer."""
        size, eps = config.hidden_size, config.rms_norm_eps
        return PreNormLayer(self.norm(size, eps), attention, self.norm(size, eps), mlp)

    def post_norm_layer(
        self, config: ModelConfig, attention: AttentionPart, mlp: TokenPart
    ) -> PostNormLayer:
        """Return a layer that normalises what attention and the feed-forward layer give."""
        size, eps = config.hidden_size, config.rms_norm_eps
        return PostNormLayer(attention, self.norm(size, eps), mlp, self.norm(size, eps))

    def model(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        *,
        embedding_multiplier: float = 1.0,
        logits_divisor: float = 1.0,
    ) -> DecoderModel:
        """Return a model of these layers, with embedding, last normalisation and output head."""
        vocabulary = (config.vocab_size, config.hidden_size)
        embed_tokens = torch.empty(vocabulary, device=self._device, dtype=self._dtype)
        lm_head = embed_tokens
        if not config.tie_word_embeddings:
            lm_head = torch.empty(vocabulary, device=self._device, dtype=self._dtype)
        return DecoderModel(
            config,
            self._ops,
            embed_tokens,
            layers,
            self.norm(config.hidden_size, config.rms_norm_eps),
            lm_head,
            embedding_multiplier,
            logits_divisor,
        )
