"""Gemma 3: as Gemma 2, with norms of query and key heads, and other angles in sliding layers.

Models that also take images are served without images: only their text model is loaded.
"""

from __future__ import annotations

import dataclasses

from pagewire.shared.model.families import gemma2
from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.families.gemma2 import read_cap, refuse_bidirectional
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.layer_ropes import full_fields, sliding_rope, with_sliding
from pagewire.shared.model.model_config import ModelConfig, read_config
from pagewire.shared.model.text_part import text_fields

_DEFAULTS = dataclasses.replace(
    gemma2.DEFAULTS,
    vocab_size=262_208,
    max_position_embeddings=131_072,
    rope_theta=1_000_000.0,
)
_LOCAL_THETA = 10_000.0
_WINDOW = 4096
_PATTERN = 6


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Gemma 3 without images.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    return _parse("Gemma3ForCausalLM", fields)


def parse_conditional_config(fields: Fields) -> ModelConfig:
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


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    refuse_bidirectional(fields)
    config = read_config(
        ModelConfig,
        architecture,
        full_fields(fields),
        _DEFAULTS,
        score_scale=fields.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        logits_cap=read_cap(fields, "final_logit_softcapping", None),
    )
    pattern = fields.positive_int("sliding_window_pattern", _PATTERN)
    rope = sliding_rope(fields, fields.positive_float("rope_local_base_freq", _LOCAL_THETA))
    return with_sliding(fields, config, rope, pattern, _WINDOW)


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Gemma 2 with norms of heads."""
    return gemma2.build(config, make, qk_norm="head")
