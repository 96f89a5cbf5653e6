"""Ministral, if no layer has a window that is shorter than the context: a kind of Mistral."""

from __future__ import annotations

from pagewire.shared.model.families.mistral import DEFAULTS, WINDOW
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import (
    ModelConfig,
    layer_types,
    read_config,
    refuse_window,
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Ministral.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(
        ModelConfig,
        "MinistralForCausalLM",
        fields,
        DEFAULTS,
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
    return fields.raw.get("sliding_window", WINDOW)
