"""Makes the layers of one model: on one device, in one dtype, with one set of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from pagewire.kernels import Ops
from pagewire.kernels.fp8_numbers import UNSCALED, KvScales
from pagewire.shared.model.experts_config import ExpertsConfig, MoeConfig
from pagewire.shared.model.latent_config import LATENT_NORM_EPS, LatentConfig
from pagewire.shared.model.layers.attention import Attention, QkNorm
from pagewire.shared.model.layers.decoder import (
    AttentionPart,
    DecoderLayer,
    DecoderModel,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    SandwichLayer,
    ScaledOutput,
    SummedOverRanks,
    TokenPart,
)
from pagewire.shared.model.layers.experts import (
    Experts,
    ExpertsShape,
    ExpertWeights,
    WithSharedExpert,
)
from pagewire.shared.model.layers.latent_attention import HeadMatrices, LatentAttention
from pagewire.shared.model.layers.linear import Linear, LinearShape, Size, Unquantized
from pagewire.shared.model.layers.methods import MethodFactory
from pagewire.shared.model.layers.mlp import Mlp
from pagewire.shared.model.layers.norms import NormFactory
from pagewire.shared.model.layers.place import Place
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.quantization.config import QuantConfig
from pagewire.shared.model.rope import cos_sin_table
from pagewire.shared.model.rope_config import RopeConfig
from pagewire.shared.model.shard import WHOLE, Communicator, Cut, Shard

PartT = TypeVar("PartT", bound="AttentionPart | TokenPart")

EACH = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")


class LayerFactory:
    """Makes the layers of which a family composes its model; parameters are not filled.

    A family's file uses only this object, so that it does not import torch.

    Args:
        device: for the parameters; on "meta" they take no memory.
        dtype: of parameters and activations.
        ops: kernels that suit the device.
        max_positions: longest sequence.
        stacked_experts: whether the checkpoint has one tensor for all experts of a layer, as
            transformers 5 can write it, instead of one for each expert.
        quantization: says which weights are quantised; None: none.
        shard: the part of the model that this rank has.
        communicator: of the model's ranks; None if the model is whole.

    Attributes:
        methods: gives projections and experts their parameters.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        ops: Ops,
        max_positions: int,
        stacked_experts: bool = False,
        quantization: QuantConfig | None = None,
        shard: Shard = WHOLE,
        communicator: Communicator | None = None,
    ) -> None:
        self.stacked_experts = stacked_experts
        self._shard = shard
        self._unit = 1 if quantization is None else quantization.unit
        self._communicator = communicator
        self._place = Place(device, dtype, ops)
        self._ops = ops
        self._max_positions = max_positions
        norms = NormFactory(self._place, shard, communicator)
        self._norms, self._norm, self._head_norms = norms, norms.make, norms.of_heads
        self.methods = MethodFactory(self._place, quantization)

    def rounded(self, value: float) -> float:
        """Return a number rounded to the activations' dtype."""
        return torch.tensor(value, dtype=self._place.dtype).item()

    def linear(
        self, ins: Size, parts: Mapping[str, Size], bias: bool, *, wide: bool = False
    ) -> Linear:
        """Return projections of one input, or this rank's part of them.

        Args:
            ins: size of the input.
            parts: out features of each projection in the checkpoint, by its name, in order.
            bias: whether each projection has a bias.
            wide: whether the projections are in float32.
        """
        return Linear(LinearShape.of(ins, parts, bias=bias, wide=wide))

    def cos_sin(self, rope: RopeConfig, head_dim: int) -> torch.Tensor:
        """Return the table of rotary angles, for all attention layers that use it."""
        return cos_sin_table(rope, head_dim, self._max_positions).to(self._place.device)

    def attention(
        self,
        config: ModelConfig,
        cos_sin: torch.Tensor | None,
        *,
        qk_norm: QkNorm = "none",
        fused: bool = False,
        window: int | None = None,
        sinks: bool = False,
        interleaved: bool = False,
        kv_scales: KvScales = UNSCALED,
    ) -> Attention:
        """Return attention over the paged KV cache.

        Args:
            config: has heads, sizes and biases.
            cos_sin: see `cos_sin`; None means no rotation.
            qk_norm: how queries and keys are normalised.
            fused: whether the checkpoint has one tensor `qkv_proj`.
            window: number of positions that a query attends to, including its own; None for all.
            sinks: whether each head has an attention sink.
            interleaved: whether neighbours of a head are rotated as pairs, instead of its halves,
                if anything is rotated.
            kv_scales: of a KV cache in FP8.
        """
        heads = self._shard.heads(config.num_heads, config.num_kv_heads)
        q, kv = (head.times(config.head_dim) for head in heads)
        parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        parts = {"qkv_proj": Cut.joined(parts.values())} if fused else parts
        # Rows of queries and keys are moved alike, so that their products do not change.
        rotated = ("q_proj", "k_proj") if interleaved and cos_sin is not None else ()
        pairs = dict.fromkeys(rotated, config.head_dim)
        return Attention(
            config,
            heads,
            self._ops,
            Linear(LinearShape.of(config.hidden_size, parts, bias=config.qkv_bias, pairs=pairs)),
            self.linear(q, {"o_proj": config.hidden_size}, config.o_bias),
            cos_sin,
            qk_norm,
            self._head_norms(config, qk_norm, q, kv),
            window,
            self._place.empty(heads[0].count) if sinks else None,
            kv_scales,
        )

    def latent_attention(self, config: LatentConfig, cos_sin: torch.Tensor) -> LatentAttention:
        """Return attention whose keys and values are made from one latent vector per token.

        Args:
            config: has heads, sizes and biases.
            cos_sin: see `cos_sin`.
        """
        heads, _ = self._shard.heads(config.num_heads, 1)
        rank, queries = config.kv_rank, heads.times(config.nope_dim + config.head_dim)
        of_cache = {"kv_a_proj_with_mqa": rank + config.head_dim}
        parts: dict[str, Size] = {"q_proj": queries, **of_cache}
        q_norm = q_up = None
        if config.q_rank is not None:
            parts = {"q_a_proj": config.q_rank, **of_cache}
            q_norm = self._norm(config, config.q_rank, LATENT_NORM_EPS)
            q_up = self.linear(config.q_rank, {"q_b_proj": queries}, False)
        values = heads.times(config.value_dim)
        return LatentAttention(
            config,
            heads.count,
            self._ops,
            self.linear(config.hidden_size, parts, config.qkv_bias),
            q_norm,
            q_up,
            self._norm(config, rank, LATENT_NORM_EPS),
            HeadMatrices(config, heads),
            self.linear(values, {"o_proj": config.hidden_size}, config.o_bias),
            cos_sin,
        )

    def mlp(
        self,
        config: ModelConfig,
        *,
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        inner: int | None = None,
    ) -> Mlp:
        """Return a gated feed-forward layer.

        Args:
            config: has sizes, biases and the activation.
            names: names of the projections in the checkpoint: gate, up and down, or gate and up in
                one tensor, and down.
            inner: the layer's intermediate size; None uses that of the configuration.
        """
        hidden, bias = config.hidden_size, config.mlp_bias
        inner = inner or config.intermediate_size
        part = self._shard.cut(inner, "the intermediate size", self._unit)
        *first, down = names
        rows = part if len(first) == 2 else Cut.joined((part, part))
        return Mlp(
            self.linear(hidden, dict.fromkeys(first, rows), bias),
            self.linear(part, {down: hidden}, bias),
            self._ops.silu_and_mul if config.activation == "silu" else self._ops.gelu_and_mul,
        )

    def experts(
        self,
        config: ModelConfig,
        experts: ExpertsConfig,
        *,
        each: tuple[str, str, str] | tuple[()] = EACH,
        stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
        router: str = "gate",
        router_bias: bool = False,
        wide_router: bool = False,
        biases: bool = False,
        interleaved: bool = False,
        transposed: bool = False,
    ) -> Experts:
        """Return a mixture of experts.

        Args:
            config: has the hidden size.
            experts: number, size, routing and activation of the experts.
            each: names of one expert's gate, up and down projection, with {} for its number; empty
                if the checkpoint always has them stacked.
            stacked: names of all experts' gate and up projections, and of their down projections.
            router: name of the router.
            router_bias: whether the router has a bias.
            wide_router: whether the router's logits are computed in float32 for any model dtype.
            biases: whether each expert's projections have biases; only with stacked weights.
            interleaved: whether rows of gate and up alternate in the stacked weights.
            transposed: whether stacked weights are [E, in, out].
        """
        count, hidden = experts.count, config.hidden_size
        inner = self._shard.cut(
            experts.intermediate_size, "the intermediate size of experts", self._unit
        )
        correction = None
        if experts.routing.corrected:
            correction = self._place.empty(count, dtype=torch.float32)
        return Experts(
            self._ops,
            self.linear(hidden, {router: count}, router_bias, wide=wide_router),
            experts.routing,
            ExpertWeights(
                ExpertsShape(
                    count,
                    hidden,
                    inner.count,
                    () if self.stacked_experts else each,
                    stacked,
                    transposed,
                    biases,
                    interleaved,
                    experts.activation,
                    None if inner.is_whole else inner,
                )
            ),
            correction,
            wide_router,
        )

    def with_shared_expert(
        self, config: MoeConfig, name: str, *, gate: str | None = None, wide_router: bool = False
    ) -> WithSharedExpert:
        """Return a mixture with a shared expert, which all tokens use.

        Args:
            config: has the sizes.
            name: name of the shared expert.
            gate: name of the projection whose sigmoid multiplies its output, if there is one.
            wide_router: see `experts`.
        """
        experts = self.experts(config, config.experts, wide_router=wide_router)
        shared = self.mlp(config, inner=config.experts.shared_size)
        gating = None if gate is None else self.linear(config.hidden_size, {gate: 1}, False)
        return WithSharedExpert(experts, shared, gating, name)

    def _reduced(self, part: PartT) -> PartT | SummedOverRanks:
        """Return a part of a layer whose outputs the ranks add up."""
        return part if self._communicator is None else SummedOverRanks(part, self._communicator)

    def pre_norm_layer(
        self,
        config: ModelConfig,
        attention: AttentionPart,
        mlp: TokenPart,
        *,
        mlp_name: str = "mlp",
    ) -> PreNormLayer:
        """Return a layer that normalises before attention and before the feed-forward layer."""
        if self._norms.can_add_up(config):
            before, between = (self._norms.of_sum(config) for _ in range(2))
            return PreNormLayer(before, attention, between, mlp, mlp_name)
        attention, mlp = self._reduced(attention), self._reduced(mlp)
        if config.residual_multiplier != 1.0:
            attention = ScaledOutput(attention, config.residual_multiplier)
            mlp = ScaledOutput(mlp, config.residual_multiplier)
        return PreNormLayer(self._norm(config), attention, self._norm(config), mlp, mlp_name)

    def parallel_layer(
        self, config: ModelConfig, attention: AttentionPart, mlp: TokenPart
    ) -> ParallelLayer:
        """Return a layer whose attention and feed-forward layer have the same normalised input."""
        return ParallelLayer(self._norm(config), attention, mlp, self._communicator)

    def post_norm_layer(
        self, config: ModelConfig, attention: AttentionPart, mlp: TokenPart
    ) -> PostNormLayer:
        """Return a layer that normalises the outputs of attention and the feed-forward layer."""
        attention, mlp = self._reduced(attention), self._reduced(mlp)
        return PostNormLayer(attention, self._norm(config), mlp, self._norm(config))

    def sandwich_layer(
        self, config: ModelConfig, attention: AttentionPart, mlp: TokenPart
    ) -> SandwichLayer:
        """Return a layer that normalises before and after attention and feed-forward layer."""
        attention, mlp = self._reduced(attention), self._reduced(mlp)
        norms = [self._norm(config) for _ in range(4)]
        return SandwichLayer(norms[0], attention, norms[1], norms[2], mlp, norms[3])

    def decoder(
        self,
        config: ModelConfig,
        layer: Callable[[ModelConfig, AttentionPart, TokenPart], DecoderLayer] | None = None,
        mlp: Callable[[], TokenPart] | None = None,
        *,
        embedding_multiplier: float | None = None,
        **attention: Any,
    ) -> DecoderModel:
        """Return a model whose layers differ only in windows, angles and mixtures of experts.

        Args:
            config: has all sizes and constants.
            layer: makes a layer of its two parts; by default `pre_norm_layer`.
            mlp: makes a layer's feed-forward layer; in a model with mixtures, that of a sparse
                layer. By default `mlp`, or `experts`.
            embedding_multiplier: see `model`.
            attention: options of `attention`, for all layers.
        """
        make_layer = layer or self.pre_norm_layer
        make_mlp: Callable[[], TokenPart] = mlp or partial(self.mlp, config)
        is_sparse = (True,) * config.num_layers
        if isinstance(config, MoeConfig):
            is_sparse = config.sparse
            make_mlp = mlp or partial(self.experts, config, config.experts)
        ropes = {rope for rope in config.ropes if rope is not None}
        tables = {rope: self.cos_sin(rope, config.head_dim) for rope in ropes}
        scales = config.kv_scales or (UNSCALED,) * config.num_layers
        layers = [
            make_layer(
                config,
                self.attention(
                    config,
                    None if rope is None else tables[rope],
                    window=window,
                    kv_scales=kv_scales,
                    **attention,
                ),
                make_mlp() if sparse else self.mlp(config),
            )
            for rope, window, sparse, kv_scales in zip(
                config.ropes, config.windows, is_sparse, scales, strict=True
            )
        ]
        return self.model(config, layers, embedding_multiplier)

    def model(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        embedding_multiplier: float | None = None,
    ) -> DecoderModel:
        """Return a model of these layers, with embedding, last normalisation and output head.

        Args:
            config: has sizes, and whether the head is the embedding.
            layers: layers that this factory made.
            embedding_multiplier: factor of the embeddings; by default that of the configuration.
        """
        tokens = self._shard.cut(config.vocab_size, "the vocabulary", self._unit)
        embed_tokens = self._place.empty(tokens.count, config.hidden_size)
        lm_head = self.linear(config.hidden_size, {"lm_head": tokens}, False)
        if config.tie_word_embeddings:
            lm_head.use(Unquantized(lm_head.shape, embed_tokens, None, self._ops))
        norms_add_up = self._norms.can_add_up(config) and all(
            isinstance(layer, PreNormLayer) for layer in layers
        )
        model = DecoderModel(
            config,
            embed_tokens,
            tokens,
            layers,
            self._norms.of_sum(config) if norms_add_up else self._norm(config),
            lm_head,
            embedding_multiplier or config.embedding_multiplier,
            self._communicator,
            norms_add_up,
        )
        self.methods.choose(model.parameters())
        return model
