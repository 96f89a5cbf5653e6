"""Gemma 3: as Gemma 2, with norms of query and key heads, and other angles in sliding layers.

Models that also take images are served without images: only their text model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.shared.model.families.gemma2 import read_cap, refuse_bidirectional
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.layer_ropes import (
    TwoRopesConfig,
    full_fields,
    sliding_rope,
    with_sliding,
)
from pagewire.shared.model.model_config import Defaults, read_config
from pagewire.shared.model.text_part import text_fields

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_layers=26,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    special_tokens=(2, 1),
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
)
_LOCAL_THETA = 10_000.0
_WINDOW = 4096
_PATTERN = 6


@dataclass(frozen=True, slots=True)
class Gemma3Config(TwoRopesConfig):
    """A Gemma 3.

    Attributes:
        attention_multiplier: factor of the scores, instead of the inverse root of the head size.
        logits_cap: a logit x becomes `cap * tanh(x / cap)`; None means no cap.
    """

    attention_multiplier: float
    logits_cap: float | None


def parse_config(fields: Fields) -> Gemma3Config:
    """Read the config.json of a Gemma 3 without images.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    return _parse("Gemma3ForCausalLM", fields)


def parse_conditional_config(fields: Fields) -> Gemma3Config:
    """Read the text model's part of the config.json of a Gemma 3 with images.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    text = text_fields(
        fields,
        {},
        tie_word_embeddings=fields.raw.get("tie_word_embeddings"),
        final_logit_softcapping=None,  # Hugging Face's code has no cap in these models
    )
    return _parse("Gemma3ForConditionalGeneration", text)


def _parse(architecture: str, fields: Fields) -> Gemma3Config:
    refuse_bidirectional(fields)
    bias = fields.flag("attention_bias", False)
    config = read_config(
        Gemma3Config,
        architecture,
        full_fields(fields),
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        attention_multiplier=fields.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        logits_cap=read_cap(fields, "final_logit_softcapping", None),
        local_rope=sliding_rope(fields, _LOCAL_THETA, "rope_local_base_freq"),
        sliding=(),
    )
    pattern = fields.positive_int("sliding_window_pattern", _PATTERN)
    return with_sliding(fields, config, pattern, _WINDOW)


def build(config: Gemma3Config, make: LayerFactory) -> DecoderModel:
    """Compose a Gemma 2 with norms of heads and two tables of angles."""
    make = make.with_norms("plus one")
    cos_sin, local_cos_sin = make.cos_sin(config), make.cos_sin(config, config.local_rope)
    layers = [
        make.sandwich_layer(
            config,
            make.attention(
                config,
                local_cos_sin if is_sliding else cos_sin,
                qk_norm="head",
                scale=config.attention_multiplier,
                window=window,
            ),
            make.mlp(config, activation="gelu"),
        )
        for is_sliding, window in zip(config.sliding, config.windows, strict=True)
    ]
    return make.model(
        config,
        layers,
        embedding_multiplier=make.rounded(config.hidden_size**0.5),
        logits_cap=config.logits_cap,
    )
