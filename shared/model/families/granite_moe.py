"""Granite with a mixture of experts in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.kernels.routing import Routing
from pagewire.shared.model.experts_config import (
    ExpertsConfig,
    chosen_count,
    expert_count,
)
from pagewire.shared.model.families.granite import GraniteConfig, compose, read_granite
from pagewire.shared.model.fields import MAX_WIDTH, Fields

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.experts import Experts
    from pagewire.shared.model.layers.factory import LayerFactory

_INTERMEDIATE = 11_008
# Names of the stacked weights and the router in published checkpoints.
_STACKED = ("input_linear.weight", "output_linear.weight")
_ROUTER = "router.layer"


@dataclass(frozen=True, slots=True)
class GraniteMoeConfig(GraniteConfig):
    """A Granite whose layers have mixtures.

    Attributes:
        experts: the mixture of each layer.
    """

    experts: ExpertsConfig


def parse_config(fields: Fields) -> GraniteMoeConfig:
    """Read the config.json of a Granite with experts.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    count = expert_count(fields, ("num_local_experts", "num_experts"), 8)
    experts = ExpertsConfig(
        count,
        fields.positive_int("intermediate_size", _INTERMEDIATE, MAX_WIDTH),
        Routing(top_k=chosen_count(fields, count, 2), renormalise=True),
    )
    return read_granite(
        GraniteMoeConfig, "GraniteMoeForCausalLM", fields, mlp_bias=False, experts=experts
    )


def build(config: GraniteMoeConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Granite with mixtures."""
    return compose(config, make, lambda: _mixture(config, make), "block_sparse_moe")


def _mixture(config: GraniteMoeConfig, make: LayerFactory) -> Experts:
    if make.stacked_experts:  # names that transformers can write
        return make.experts(config, config.experts, each=(), router="router")
    return make.experts(config, config.experts, each=(), stacked=_STACKED, router=_ROUTER)
