"""Mistral: a Llama with other defaults, and perhaps a sliding window in all layers."""

from __future__ import annotations

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import read_window, with_windows

DEFAULTS = Defaults(
    vocab_size=32_000,
    intermediate_size=14_336,
    max_position_embeddings=131_072,
    special_tokens=(1, 2),
    num_kv_heads=8,
)
WINDOW = 4096


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Mistral.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(
        ModelConfig,
        "MistralForCausalLM",
        fields,
        DEFAULTS,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )
    window = read_window(fields, WINDOW)
    return with_windows(fields, config, window, [window is not None] * config.num_layers)
