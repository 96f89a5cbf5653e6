"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import switched_window, with_some_windows

DEFAULTS = Defaults(
    vocab_size=151_936,
    intermediate_size=22_016,
    max_position_embeddings=32_768,
    special_tokens=(None, None),
    num_kv_heads=32,
    attention_bias=None,
)
_WINDOW = 4096
_FIRST_WINDOW = 28  # the first layer with a window, by default


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen2.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(ModelConfig, "Qwen2ForCausalLM", fields, DEFAULTS, qkv_bias=True)
    return with_upper_windows(fields, config)


def with_upper_windows(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the window, if it is enabled, in all but the first layers.

    Raises:
        ModelLoadError: a field is wrong; one line.
    """
    window = switched_window(fields, _WINDOW)
    first = fields.whole_number("max_window_layers", _FIRST_WINDOW)
    return with_some_windows(
        fields, config, window, lambda index: window is not None and index >= first
    )
