"""Qwen3: a Llama whose query and key heads are normalised before the rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.shared.model.families.qwen2 import with_upper_windows
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
    vocab_size=151_936,
    intermediate_size=22_016,
    max_position_embeddings=32_768,
    special_tokens=(None, None),
    num_kv_heads=32,
    head_dim=128,
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    bias = fields.flag("attention_bias", False)
    config = read_config(
        ModelConfig,
        "Qwen3ForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
    )
    return with_upper_windows(fields, config)


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with a norm of each query and key head."""
    cos_sin = make.cos_sin(config)
    layers = [
        make.pre_norm_layer(
            config,
            make.attention(config, cos_sin, qk_norm="head", window=window),
            make.mlp(config),
        )
        for window in config.windows
    ]
    return make.model(config, layers)
