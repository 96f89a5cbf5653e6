"""Ministral, if no layer has a window that is shorter than the context: a kind of Mistral."""

from __future__ import annotations

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import (
    Defaults,
    ModelConfig,
    layer_types,
    read_config,
    refuse_window,
)

_DEFAULTS = Defaults(
    vocab_size=32_000,
    intermediate_size=14_336,
    max_position_embeddings=131_072,
    special_tokens=(1, 2),
    num_kv_heads=8,
)
_WINDOW = 4096


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Ministral.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(
        ModelConfig,
        "MinistralForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )
    refuse_window(fields, config, _window(fields))
    return config


def _window(fields: Fields) -> object:
    """Return the window of its sliding layers, by default all; None if it has none of them."""
    kinds = layer_types(fields)
    if kinds and "sliding_attention" not in kinds:
        return None
    return fields.raw.get("sliding_window", _WINDOW)
