"""Llama and the architectures that differ from it by biases alone (Mistral, Qwen2).

The residual stream runs alongside the hidden states: each normalisation adds the one to the other,
so that a layer is a plain list of fused steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from pagewire.kernels import Ops
from pagewire.shared.model.config import ModelConfig
from pagewire.shared.model.inputs import ForwardBatch, OnLayerEnd
from pagewire.shared.model.layers import Linear, NamedTarget, RmsNorm
from pagewire.shared.model.rope import cos_sin_table


class Attention:
    """Grouped-query attention over the paged KV cache."""

    __slots__ = (
        "_cos_sin",
        "_head_dim",
        "_heads",
        "_num_heads",
        "_ops",
        "_scale",
        "o_proj",
        "qkv_proj",
    )

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        cos_sin: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._ops = ops
        self._cos_sin = cos_sin  # [max_positions, D]
        self._num_heads = config.num_heads
        self._head_dim = config.head_dim
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._scale = config.head_dim**-0.5
        sizes = [heads * config.head_dim for heads in self._heads]
        self.qkv_proj = Linear(config.hidden_size, sizes, config.qkv_bias, ops, device, dtype)
        self.o_proj = Linear(sizes[0], [config.hidden_size], config.o_bias, ops, device, dtype)

    def forward(
        self, hidden: torch.Tensor, batch: ForwardBatch, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Attend `[T, hidden]`, writing keys and values to `kv_cache` [NB, 2, KH, BS, D]."""
        tokens = hidden.shape[0]
        qkv = self.qkv_proj(hidden).view(tokens, -1, self._head_dim)
        q, k, v = qkv.split_with_sizes(self._heads, dim=1)  # strided views [T, heads, D]
        k_cache, v_cache = kv_cache.unbind(1)
        self._ops.rotary_and_cache(
            batch.positions, q, k, v, self._cos_sin, k_cache, v_cache, batch.slot_mapping
        )
        out = torch.empty(
            tokens, self._num_heads, self._head_dim, dtype=hidden.dtype, device=hidden.device
        )
        self._attend(q, k_cache, v_cache, batch, out)
        return self.o_proj(out.view(tokens, -1))

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` [T, H, D]: decode rows first, then the prefill chunks."""
        decodes = batch.num_decodes
        if batch.decode_block_tables is not None and batch.decode_seq_lens is not None:
            self._ops.paged_decode(
                q[:decodes],
                k_cache,
                v_cache,
                batch.decode_block_tables,
                batch.decode_seq_lens,
                self._scale,
                out=out[:decodes],
            )
        if (
            batch.prefill_block_tables is not None
            and batch.prefill_cu_query_lens is not None
            and batch.prefill_seq_lens is not None
        ):
            self._ops.paged_prefill(
                q[decodes:],
                k_cache,
                v_cache,
                batch.prefill_block_tables,
                batch.prefill_cu_query_lens,
                batch.prefill_seq_lens,
                batch.max_query_len,
                self._scale,
                out=out[decodes:],
            )

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the projections."""
        yield from self.qkv_proj.targets([f"{name}.{part}_proj" for part in "qkv"])
        yield from self.o_proj.targets([f"{name}.o_proj"])


class Mlp:
    """The gated feed-forward layer."""

    __slots__ = ("_silu_and_mul", "down_proj", "gate_up_proj")

    def __init__(
        self, config: ModelConfig, ops: Ops, device: torch.device, dtype: torch.dtype
    ) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._silu_and_mul = ops.silu_and_mul
        self.gate_up_proj = Linear(hidden, [inner, inner], bias, ops, device, dtype)
        self.down_proj = Linear(inner, [hidden], bias, ops, device, dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        return self.down_proj(self._silu_and_mul(self.gate_up_proj(hidden)))

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the projections."""
        yield from self.gate_up_proj.targets([f"{name}.gate_proj", f"{name}.up_proj"])
        yield from self.down_proj.targets([f"{name}.down_proj"])


class DecoderLayer:
    """Attention and feed-forward, each after a normalisation."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        cos_sin: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RmsNorm(size, eps, ops, device, dtype)
        self.attention = Attention(config, ops, cos_sin, device, dtype)
        self.post_attention_norm = RmsNorm(size, eps, ops, device, dtype)
        self.mlp = Mlp(config, ops, device, dtype)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and residual stream, `[T, hidden]`, not yet added together."""
        hidden, residual = self.input_norm(hidden, residual)
        hidden = self.attention.forward(hidden, batch, kv_cache)
        hidden, residual = self.post_attention_norm(hidden, residual)
        return self.mlp.forward(hidden), residual

    def targets(self, name: str) -> Iterator[NamedTarget]:
        """Yield what fills the layer."""
        yield from self.input_norm.targets(f"{name}.input_layernorm")
        yield from self.attention.targets(f"{name}.self_attn")
        yield from self.post_attention_norm.targets(f"{name}.post_attention_layernorm")
        yield from self.mlp.targets(f"{name}.mlp")


class LlamaForCausalLM:
    """The whole model, its parameters uninitialised until a loader has filled `targets()`.

    Attributes:
        config: the model's shape.
        layers: in order; a fused kernel may replace the steps of any.
        embed_tokens: `[vocab, hidden]`.
        lm_head: `[vocab, hidden]`; the same tensor as `embed_tokens` if they are tied.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        ops: Ops,
        max_positions: int,
    ) -> None:
        self.config = config
        self._linear = ops.linear
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed_tokens = torch.empty(vocabulary, device=device, dtype=dtype)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = torch.empty(vocabulary, device=device, dtype=dtype)
        cos_sin = cos_sin_table(config.rope, config.head_dim, max_positions).to(device)
        self.layers = [
            DecoderLayer(config, ops, cos_sin, device, dtype) for _ in range(config.num_layers)
        ]
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, ops, device, dtype)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, kv_pool: torch.Tensor, on_layer_end: OnLayerEnd | None = None
    ) -> torch.Tensor:
        """Run one step.

        Args:
            batch: the step's tokens, `[T]`.
            kv_pool: `[NB, L, 2, KH, BS, D]`; the tokens' keys and values are written to it.
            on_layer_end: called with the number of each layer, from 0, once it is launched.

        Returns:
            Hidden states after the last normalisation, `[T, hidden]`.
        """
        hidden = F.embedding(batch.input_ids, self.embed_tokens)
        residual: torch.Tensor | None = None
        caches = kv_pool.unbind(1)
        for index, (layer, kv_cache) in enumerate(zip(self.layers, caches, strict=True)):
            hidden, residual = layer.forward(hidden, residual, batch, kv_cache)
            if on_layer_end is not None:
                on_layer_end(index)
        return self.norm(hidden, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits `[N, vocab]` of hidden states `[N, hidden]`, in the model's dtype.

        Args:
            hidden: final hidden states.
            out: [N, vocab] to write them to, if they are to be there.
        """
        return self._linear(hidden, self.lm_head, out=out)

    def targets(self) -> Iterator[NamedTarget]:
        """Yield every checkpoint tensor's name and the part of a parameter that it fills."""
        yield "model.embed_tokens.weight", self.embed_tokens
        for index, layer in enumerate(self.layers):
            yield from layer.targets(f"model.layers.{index}")
        yield from self.norm.targets("model.norm")
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head
