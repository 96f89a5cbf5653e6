"""Cohere: Command R and Aya, with parallel attention and feed-forward layers (one input).

The second architecture (Command R7B, Command A, later Aya models) has sliding windows in most
layers, and rotates queries and keys only in these.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config, read_num_layers
from pagewire.shared.model.windows import read_window, refuse_window, sliding_layers, with_windows

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

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
)
_SECOND_DEFAULTS = dataclasses.replace(_DEFAULTS, rope_theta=10_000.0)
_LOGIT_SCALE = 0.0625
_WINDOW = 4096
_INTERVAL = 4  # each fourth layer has full attention


@dataclass(frozen=True, slots=True)
class CohereConfig(ModelConfig):
    """A Cohere model.

    Attributes:
        logit_scale: factor of logits.
        rotates: whether each layer rotates queries and keys.
    """

    logit_scale: float
    rotates: tuple[bool, ...]


def parse_config(fields: Fields) -> CohereConfig:
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


def parse_second_config(fields: Fields) -> CohereConfig:
    """Read the config.json of the second architecture.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = _read("Cohere2ForCausalLM", fields, _SECOND_DEFAULTS)
    interval = fields.positive_int("sliding_window_pattern", _INTERVAL)
    sliding = sliding_layers(fields, config.num_layers, lambda index: (index + 1) % interval != 0)
    config = dataclasses.replace(config, rotates=sliding)
    return with_windows(fields, config, read_window(fields, _WINDOW), sliding)


def _read(architecture: str, fields: Fields, defaults: Defaults) -> CohereConfig:
    bias = fields.flag("attention_bias", False)
    eps = fields.positive_float("layer_norm_eps", defaults.rms_norm_eps)
    layers = read_num_layers(fields, defaults.num_layers)
    return read_config(
        CohereConfig,
        architecture,
        Fields({**fields.raw, "rms_norm_eps": eps}, fields.source),
        defaults,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        logit_scale=fields.positive_float("logit_scale", _LOGIT_SCALE),
        rotates=(True,) * layers,
    )


def build(config: CohereConfig, make: LayerFactory) -> DecoderModel:
    """Compose parallel layers."""
    make = make.with_norms("centred")
    cos_sin = make.cos_sin(config)
    layers = [
        make.parallel_layer(
            config,
            make.attention(
                config, cos_sin if rotates else None, window=window, interleaved=rotates
            ),
            make.mlp(config),
        )
        for rotates, window in zip(config.rotates, config.windows, strict=True)
    ]
    return make.model(config, layers, logits_divisor=1 / config.logit_scale)
