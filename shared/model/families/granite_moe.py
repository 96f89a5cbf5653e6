"""Granite with a mixture of experts in each layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from pagewire.shared.model.experts_config import MoeConfig, read_renormalised_experts
from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.families.granite import read_granite
from pagewire.shared.model.families.llama import DEFAULTS
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import read_num_layers

# Names of the stacked weights and the router in published checkpoints.
_PUBLISHED: dict[str, Any] = {
    "stacked": ("input_linear.weight", "output_linear.weight"),
    "router": "router.layer",
}


def parse_config(fields: Fields) -> MoeConfig:
    """Read the config.json of a Granite with experts.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    return read_granite(
        MoeConfig,
        "GraniteMoeForCausalLM",
        fields,
        mlp_bias=False,
        experts=read_renormalised_experts(
            fields, count=8, top_k=2, size=DEFAULTS.intermediate_size
        ),
        sparse=(True,) * read_num_layers(fields, DEFAULTS.num_layers),
    )


def build(config: MoeConfig, make: LayerFactory) -> DecoderModel:
    """Build a Granite model with a mixture of experts in each layer."""
    layer = partial(make.pre_norm_layer, mlp_name="block_sparse_moe")
    # Stacked experts have the names that transformers can write.
    names = {"router": "router"} if make.stacked_experts else _PUBLISHED
    mixture = partial(make.experts, config, config.experts, each=(), **names)
    return make.decoder(config, layer, mixture)
