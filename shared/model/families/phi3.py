"""Phi-3, 3.5 and 4: a Llama with fused projections, which may rotate a part of each head."""

from __future__ import annotations

from functools import partial

from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import Defaults, ModelConfig, read_config
from pagewire.shared.model.windows import read_window, with_windows

_DEFAULTS = Defaults(
    vocab_size=32_064,
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
    special_tokens=(1, 32_000),
    rms_norm_eps=1e-5,
    attention_bias=None,
)
_ORIGINAL_POSITIONS = 4096
_ROPE_TYPES = ("default", "longrope")


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Phi-3.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(
        ModelConfig, "Phi3ForCausalLM", _with_todays_names(fields), _DEFAULTS, partial_rotary=True
    )
    if config.rope.rope_type not in _ROPE_TYPES:
        raise fields.error(
            f"rope type {config.rope.rope_type!r} is not supported in a Phi-3; supported are "
            f"{', '.join(_ROPE_TYPES)}"
        )
    return with_windows(fields, config, read_window(fields, None))


def _with_todays_names(fields: Fields) -> Fields:
    """Return the fields with the rope type's current name; old files have "su" or "yarn"."""
    raw = {"original_max_position_embeddings": _ORIGINAL_POSITIONS, **fields.raw}
    for name in ("rope_scaling", "rope_parameters"):
        rope = raw.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            raw[name] = {**rope, "rope_type": "longrope"}
    return Fields(raw, fields.source)


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with the fused projections of the checkpoint."""
    mlp = partial(make.mlp, config, names=("gate_up_proj", "down_proj"))
    return make.decoder(config, mlp=mlp, fused=True)
