"""Mistral: a Llama with other defaults, and perhaps a sliding window in all layers.

Models that also take images, such as Mistral Small 3.1, are served without images: only their text
model is loaded.
"""

from __future__ import annotations

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.text_part import text_fields
from pagewire.shared.model.windows import read_window, with_windows

DEFAULTS = Defaults(
    vocab_size=32_000,
    intermediate_size=14_336,
    max_position_embeddings=131_072,
    special_tokens=(1, 2),
    num_kv_heads=8,
    attention_bias=None,
)
WINDOW = 4096


# Default fields of a model that also takes images.
_TEXT = {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "num_hidden_layers": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
    "vocab_size": 131_072,
}


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Mistral.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    return _parse("MistralForCausalLM", fields)


def parse_conditional_config(fields: Fields) -> ModelConfig:
    """Read the text model's part of the config.json of a Mistral that also takes images.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    text = text_fields(fields, _TEXT)
    kind = text.raw.get("model_type") or "mistral"
    if kind != "mistral":
        why = ": it scales queries by their positions" if kind == "ministral3" else ""
        raise fields.error(
            f"text_config of model_type {kind!r} is not supported{why}; supported is mistral"
        )
    return _parse("Mistral3ForConditionalGeneration", text)


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    config = read_config(ModelConfig, architecture, fields, DEFAULTS)
    return with_windows(fields, config, read_window(fields, WINDOW))
