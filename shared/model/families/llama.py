"""Llama 2 to 3.3, and the model of families that differ only in biases and windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import refuse_window

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
    vocab_size=32_000,
    intermediate_size=11_008,
    max_position_embeddings=2048,
    special_tokens=(1, 2),
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Llama.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    bias = fields.flag("attention_bias", False)
    config = read_config(
        ModelConfig,
        "LlamaForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    refuse_window(fields)
    return config


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose layers of rotary attention and a gated feed-forward layer, with norms before each."""
    cos_sin = make.cos_sin(config)
    layers = [
        make.pre_norm_layer(
            config, make.attention(config, cos_sin, window=window), make.mlp(config)
        )
        for window in config.windows
    ]
    return make.model(config, layers)
