"""The shape of a decoder, and what the families' parsers of config.json share.

Missing fields have the defaults of Hugging Face's configuration classes, so that a directory means
the same here and there. What cannot be computed exactly is refused, not approximated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from pagewire.kernels.fp8_numbers import KvScales
from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.model.fields import MAX_COUNT, MAX_TOKENS, MAX_WIDTH, Fields
from pagewire.shared.model.quantization.config import QuantConfig
from pagewire.shared.model.quantization.reader import read_quantization
from pagewire.shared.model.rope_config import RopeConfig, read_rope
from pagewire.shared.model.shard import WHOLE, Shard

SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")
# A configuration has entries for each layer, which take memory before any weight is read.
MAX_LAYERS = 4096

Activation = Literal["silu", "gelu"]  # "gelu" is the tanh approximation
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
# What the weight of a normalisation multiplies. "rounded": the normalised value, rounded to the
# activations' dtype, as in Llama. "wide": the value in float32. "plus one": as "wide", with one
# added to the checkpoint's weight, as in Gemma. "centred": layer normalisation without a bias in
# float32, as in Cohere.
NormStyle = Literal["rounded", "wide", "plus one", "centred"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a decoder; a family with more of them has a subclass.

    Attributes:
        architecture: Hugging Face's class name, e.g. `LlamaForCausalLM`.
        head_dim: may differ from `hidden_size / num_heads`.
        max_position_embeddings: longest sequence that is computed exactly.
        qkv_bias: whether the query, key and value projections have a bias.
        o_bias: whether the attention's output projection has one.
        mlp_bias: whether the feed-forward projections have one.
        dtype: of the checkpoint: `float32`, `float16` or `bfloat16`.
        eos_token_ids: tokens that end an answer; may be empty.
        bos_token_id: None if the model has none.
        windows: of each layer: a query at position p attends to positions p - window + 1 to p; None
            for all up to p, also where the window is at least as long as the context.
        ropes: of each layer: its rotary parameters; None if it rotates nothing.
        score_scale: factor of the scores, usually the inverse root of the head size.
        scores_cap: a score x becomes `cap * tanh(x / cap)`; None means no cap.
        embedding_multiplier: factor of the embeddings.
        residual_multiplier: factor of the outputs of attention and feed-forward.
        logits_divisor: divisor of logits.
        logits_cap: as `scores_cap`, for logits.
        quantization: which weights are quantised; None: none.
        kv_dtype: of the KV cache; None: that of activations.
        kv_scales: of each layer's KV cache, if the checkpoint has some and the cache is in FP8.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...] = ()
    score_scale: float = 1.0
    scores_cap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    norm_style: NormStyle = "rounded"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    quantization: QuantConfig | None = None
    kv_dtype: str | None = None
    kv_scales: tuple[KvScales, ...] = ()

    @property
    def cached_token(self) -> CachedToken:
        """The numbers that each layer caches of a token."""
        return CachedToken(2, self.num_kv_heads, self.head_dim)

    def kv_layout(self, block_size: int, dtype: str, shard: Shard = WHOLE) -> KvLayout:
        """Return the layout of a rank's KV blocks.

        Args:
            block_size: tokens of a block.
            dtype: name of the activations' dtype, which the numbers have unless they are in FP8.
            shard: the part of the model that the rank has.

        Raises:
            ModelLoadError: this number of ranks cannot share the heads; one line.
        """
        token = self.cached_token
        _, heads = shard.heads(self.num_heads, token.heads)
        token = msgspec.structs.replace(token, heads=heads.count)
        layout = KvLayout.of(self.windows, token, block_size, self.kv_dtype or dtype)
        return msgspec.structs.replace(layout, ranks=shard.count)

    def attention_bytes(self, tokens: int, element_size: int) -> int:
        """Return what an attention layer holds at once of these tokens, its input not counted."""
        width = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return tokens * width * element_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The values of fields that a family's config.json may leave out.

    Attributes:
        num_kv_heads: None: as many as query heads.
        head_dim: None: hidden size / query heads.
        special_tokens: ids of the tokens that begin and end a text.
        activation: the field that names the feed-forward layers' activation, and the only value
            that is supported.
        attention_bias: whether the attention's projections have a bias; None: they have none,
            whatever the file says.
        mlp_bias: the same of the feed-forward projections.
        norm_style: of all normalisations; not a field of the file.
    """

    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    special_tokens: tuple[int | None, int | None]
    hidden_size: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    attention_bias: bool | None = False
    mlp_bias: bool | None = None
    norm_style: NormStyle = "rounded"


Config = TypeVar("Config", bound=ModelConfig)


def read_config(
    kind: type[Config],
    architecture: str,
    fields: Fields,
    defaults: Defaults,
    *,
    partial_rotary: bool = False,
    **own: Any,
) -> Config:
    """Read the fields that all families have.

    Args:
        kind: the family's class of configuration.
        architecture: Hugging Face's class name.
        fields: of config.json.
        defaults: of the family.
        partial_rotary: whether a part of each head may be rotated.
        own: the remaining fields of `kind`: what the family alone has, or has otherwise.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    _refuse_variants(fields, defaults)
    number = fields.positive_int
    hidden_size = number("hidden_size", defaults.hidden_size, MAX_WIDTH)
    num_heads = number("num_attention_heads", defaults.num_heads, MAX_COUNT)
    head_dim = read_head_dim(fields, "head_dim", defaults.head_dim or hidden_size // num_heads)
    positions = number("max_position_embeddings", defaults.max_position_embeddings, MAX_TOKENS)
    rope = read_rope(fields, positions, head_dim, defaults.rope_theta, partial_rotary)
    begin, end = defaults.special_tokens
    num_layers = read_num_layers(fields, defaults.num_layers)
    vocab_size = number("vocab_size", defaults.vocab_size, MAX_TOKENS)
    bias = _has_bias(fields, "attention_bias", defaults.attention_bias)
    mlp_bias = _has_bias(fields, "mlp_bias", defaults.mlp_bias)
    return kind(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size", defaults.intermediate_size, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, defaults, num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.positive_float("rms_norm_eps", defaults.rms_norm_eps),
        rope=rope,
        max_position_embeddings=rope.context(positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings", defaults.tie_word_embeddings),
        dtype=read_dtype(fields),
        eos_token_ids=fields.eos_token_ids(vocab_size, end),
        bos_token_id=fields.token_id("bos_token_id", begin),
        windows=(None,) * num_layers,
        ropes=(rope,) * num_layers,
        o_bias=bias,
        activation=_ACTIVATIONS[defaults.activation[1]],
        norm_style=defaults.norm_style,
        quantization=read_quantization(fields),
        **{"score_scale": head_dim**-0.5, "qkv_bias": bias, "mlp_bias": mlp_bias, **own},
    )


def _has_bias(fields: Fields, name: str, default: bool | None) -> bool:
    return default is not None and fields.flag(name, default)


def read_head_dim(fields: Fields, name: str, default: int) -> int:
    """Return the size of a head, or of its rotated part.

    Raises:
        ModelLoadError: it is wrong or odd; one line.
    """
    size = fields.positive_int(name, default, MAX_WIDTH)
    if size % 2:
        raise fields.error(f"{name} ({size}) is odd; rotary embedding needs pairs")
    return size


def _refuse_variants(fields: Fields, defaults: Defaults) -> None:
    """Refuse activations that no family's layers support."""
    name, activation = defaults.activation
    if fields.raw.get(name, activation) != activation:
        raise fields.error(f"{name} {fields.raw[name]!r} is not supported; only {activation!r}")


def _num_kv_heads(fields: Fields, defaults: Defaults, num_heads: int) -> int:
    """Return the number of KV heads; an explicit null means as many as query heads."""
    count = defaults.num_kv_heads
    if "num_key_value_heads" in fields.raw or count is None:
        count = fields.positive_int("num_key_value_heads", num_heads, MAX_COUNT)
    check_groups(fields, num_heads, count)
    return count


def check_groups(fields: Fields, num_heads: int, num_kv_heads: int) -> None:
    """Check that all KV heads have the same number of query heads.

    Raises:
        ModelLoadError: they do not; one line.
    """
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )


def read_num_layers(fields: Fields, default: int | None = None) -> int:
    """Return the number of layers.

    Raises:
        ModelLoadError: it is missing without a default, not a positive integer, or above
            `MAX_LAYERS`; one line.
    """
    return fields.positive_int("num_hidden_layers", default, MAX_LAYERS)


def read_dtype(fields: Fields) -> str:
    """Return the checkpoint's dtype, by `dtype` or the older `torch_dtype`; float32 by default.

    Raises:
        ModelLoadError: it is not one of `SUPPORTED_DTYPES`; one line.
    """
    named = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    if named not in SUPPORTED_DTYPES:
        supported = ", ".join(SUPPORTED_DTYPES)
        raise fields.error(f"dtype {named!r} is not supported; supported are {supported}")
    return str(named)
