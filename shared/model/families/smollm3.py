"""SmolLM3: a Llama in which some layers, by default each fourth, have no rotation."""

from __future__ import annotations

import dataclasses

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import switched_window, with_some_windows

_DEFAULTS = Defaults(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=11_008,
    num_layers=36,
    num_heads=16,
    num_kv_heads=4,
    max_position_embeddings=32_768,
    special_tokens=(128_000, 128_001),
    rope_theta=2_000_000.0,
    tie_word_embeddings=True,
    mlp_bias=False,
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a SmolLM3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(ModelConfig, "SmolLM3ForCausalLM", fields, _DEFAULTS)
    rotates = _rotates(fields, config.num_layers)
    ropes = tuple(config.rope if flag else None for flag in rotates)
    window = switched_window(fields, None)
    return with_some_windows(
        fields,
        dataclasses.replace(config, ropes=ropes),
        window,
        lambda index: window is not None and not rotates[index],
    )


def _rotates(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Read `no_rope_layers`, where 1 means that a layer rotates, or else the interval."""
    flags = fields.raw.get("no_rope_layers")
    if flags is None:
        interval = fields.positive_int("no_rope_layer_interval", 4)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if (
        not isinstance(flags, list)
        or len(flags) < layers
        or any(flag not in (0, 1) for flag in flags)
    ):
        raise fields.error(f"no_rope_layers must be {layers} numbers that are 0 or 1")
    return tuple(flag == 1 for flag in flags[:layers])
