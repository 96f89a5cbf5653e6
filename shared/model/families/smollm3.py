"""SmolLM3: a Llama in which some layers, by default each fourth, have no rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config, read_num_layers
from pagewire.shared.model.windows import sliding_layers, switched_window, with_windows

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

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
)


@dataclass(frozen=True, slots=True)
class SmolLM3Config(ModelConfig):
    """A SmolLM3.

    Attributes:
        rotates: whether each layer rotates queries and keys.
    """

    rotates: tuple[bool, ...]


def parse_config(fields: Fields) -> SmolLM3Config:
    """Read the config.json of a SmolLM3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    bias = fields.flag("attention_bias", False)
    config = read_config(
        SmolLM3Config,
        "SmolLM3ForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        rotates=_rotates(fields),
    )
    window = switched_window(fields, None)
    sliding = sliding_layers(
        fields,
        config.num_layers,
        lambda index: window is not None and not config.rotates[index],
    )
    return with_windows(fields, config, window, sliding)


def _rotates(fields: Fields) -> tuple[bool, ...]:
    """Read `no_rope_layers`, where 1 means that a layer rotates, or else the interval."""
    layers = read_num_layers(fields, _DEFAULTS.num_layers)
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


def build(config: SmolLM3Config, make: LayerFactory) -> DecoderModel:
    """Compose a Llama, with the table of angles only where a layer rotates."""
    cos_sin = make.cos_sin(config)
    layers = [
        make.pre_norm_layer(
            config,
            make.attention(config, cos_sin if rotates else None, window=window),
            make.mlp(config),
        )
        for rotates, window in zip(config.rotates, config.windows, strict=True)
    ]
    return make.model(config, layers)
