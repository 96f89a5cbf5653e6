"""Granite: a Llama with multipliers on embedding, scores, layer outputs and logits."""

from __future__ import annotations

from typing import Any

from pagewire.shared.model.families.llama import DEFAULTS
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Config, ModelConfig, read_config
from pagewire.shared.model.windows import refuse_window


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Granite.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    return read_granite(ModelConfig, "GraniteForCausalLM", fields)


def read_granite(kind: type[Config], architecture: str, fields: Fields, **own: Any) -> Config:
    """Read the fields that Granites with and without experts have in common.

    Args:
        kind: the class of the configuration.
        architecture: Hugging Face's class name.
        fields: the fields of config.json.
        own: the remaining fields of `kind`.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    refuse_window(fields)
    return read_config(
        kind,
        architecture,
        fields,
        DEFAULTS,
        embedding_multiplier=fields.positive_float("embedding_multiplier", 1.0),
        score_scale=fields.positive_float("attention_multiplier", 1.0),
        residual_multiplier=fields.positive_float("residual_multiplier", 1.0),
        logits_divisor=fields.positive_float("logits_scaling", 1.0),
        **own,
    )
