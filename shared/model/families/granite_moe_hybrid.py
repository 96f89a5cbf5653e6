"""Granite 4 without Mamba layers and experts: a Granite whose feed-forward layer is "shared"."""

from __future__ import annotations

import dataclasses
from functools import partial

from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.families.granite import read_granite
from pagewire.shared.model.fields import MAX_COUNT, MAX_WIDTH, Fields
from pagewire.shared.model.model_config import ModelConfig
from pagewire.shared.model.windows import FULL_KINDS

_SHARED_SIZE = 1024
_EXPERTS = 8


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Granite 4.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_granite(
        ModelConfig,
        "GraniteMoeHybridForCausalLM",
        fields,
        mlp_bias=False,
    )
    if fields.whole_number("num_local_experts", _EXPERTS, MAX_COUNT):
        raise fields.error("num_local_experts is not 0: Granite 4 is supported without experts")
    kinds = fields.raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise fields.error(f"layer_types must be a list of {config.num_layers} kinds of layers")
    for kind in kinds:
        if kind not in FULL_KINDS:
            raise fields.error(
                f"layer_types has {kind!r}: layers that keep a state other than keys and values "
                "are not supported"
            )
    size = fields.positive_int("shared_intermediate_size", _SHARED_SIZE, MAX_WIDTH)
    rotates = fields.raw.get("position_embedding_type") == "rope"
    ropes = config.ropes if rotates else (None,) * config.num_layers
    return dataclasses.replace(config, intermediate_size=size, ropes=ropes)


def build(config: ModelConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Granite whose feed-forward layers are named as Granite 4's shared experts."""
    layer = partial(make.pre_norm_layer, mlp_name="shared_mlp")
    mlp = partial(make.mlp, config, names=("input_linear", "output_linear"))
    return make.decoder(config, layer, mlp)
