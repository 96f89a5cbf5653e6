"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import (
    Defaults,
    ModelConfig,
    read_config,
    refuse_window,
    switched_window,
)

_DEFAULTS = Defaults(
    vocab_size=151_936,
    intermediate_size=22_016,
    max_position_embeddings=32_768,
    special_tokens=(None, None),
    num_kv_heads=32,
)
_WINDOW = 4096


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen2.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(
        ModelConfig,
        "Qwen2ForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
    )
    refuse_window(fields, config, switched_window(fields, _WINDOW))
    return config
