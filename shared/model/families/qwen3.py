"""Qwen3: a Llama whose query and key heads are normalised before the rotation."""

from __future__ import annotations

import dataclasses

from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.families.qwen2 import DEFAULTS, with_upper_windows
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import ModelConfig, read_config

_DEFAULTS = dataclasses.replace(DEFAULTS, head_dim=128, attention_bias=False)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(ModelConfig, "Qwen3ForCausalLM", fields, _DEFAULTS)
    return with_upper_windows(fields, config)


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with a norm of each query and key head."""
    return make.decoder(config, qk_norm="head")
