"""Cohere: Command R and Aya, with parallel attention and feed-forward layers (one input).

The second architecture (Command R7B, Command A, later Aya models) has sliding windows in most
layers, and rotates queries and keys only in these.
"""

from __future__ import annotations

import dataclasses

from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import read_window, refuse_window, sliding_layers, with_windows

_DEFAULTS = Defaults(
    vocab_size=256_000,
    hidden_size=8192,
    intermediate_size=22_528,
    num_layers=40,
    num_heads=64,
    max_position_embeddings=8192,
    special_tokens=(5, 255_001),
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
    norm_style="centred",
)
_SECOND_DEFAULTS = dataclasses.replace(_DEFAULTS, rope_theta=10_000.0)
_LOGIT_SCALE = 0.0625
_WINDOW = 4096
_INTERVAL = 4  # each fourth layer has full attention


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of the first architecture.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    if fields.flag("use_qk_norm", False):
        raise fields.error(
            "use_qk_norm is not supported; --model-impl transformers runs the model by Hugging "
            "Face's code, which is slower"
        )
    refuse_window(fields)
    return _read("CohereForCausalLM", fields, _DEFAULTS)


def parse_second_config(fields: Fields) -> ModelConfig:
    """Read the config.json of the second architecture.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = _read("Cohere2ForCausalLM", fields, _SECOND_DEFAULTS)
    interval = fields.positive_int("sliding_window_pattern", _INTERVAL)
    sliding = sliding_layers(fields, config.num_layers, lambda index: (index + 1) % interval != 0)
    ropes = tuple(config.rope if is_sliding else None for is_sliding in sliding)
    config = dataclasses.replace(config, ropes=ropes)
    return with_windows(fields, config, read_window(fields, _WINDOW), sliding)


def _read(architecture: str, fields: Fields, defaults: Defaults) -> ModelConfig:
    eps = fields.positive_float("layer_norm_eps", defaults.rms_norm_eps)
    return read_config(
        ModelConfig,
        architecture,
        Fields({**fields.raw, "rms_norm_eps": eps}, fields.source),
        defaults,
        logits_divisor=1 / fields.positive_float("logit_scale", _LOGIT_SCALE),
    )


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Build a model whose attention and feed-forward layers read the same input."""
    return make.decoder(config, make.parallel_layer, interleaved=True)
