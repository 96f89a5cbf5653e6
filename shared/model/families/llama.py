"""Llama 2 to 3.3, and the model of families that differ only in biases and windows."""

from __future__ import annotations

from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import refuse_window

DEFAULTS = Defaults(
    vocab_size=32_000,
    intermediate_size=11_008,
    max_position_embeddings=2048,
    special_tokens=(1, 2),
    mlp_bias=False,
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Llama.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    refuse_window(fields)
    return read_config(ModelConfig, "LlamaForCausalLM", fields, DEFAULTS)


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose layers of rotary attention and a gated feed-forward layer, with norms before each."""
    return make.decoder(config)
