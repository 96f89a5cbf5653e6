"""Mixtral: a Mistral whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

import dataclasses
from functools import partial

from pagewire.shared.model.experts_config import MoeConfig, read_renormalised_experts
from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.families.mistral import DEFAULTS
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.model_config import read_config, read_num_layers
from pagewire.shared.model.windows import read_window, with_windows

_DEFAULTS = dataclasses.replace(DEFAULTS, rms_norm_eps=1e-5, rope_theta=1_000_000.0)
_EACH = ("experts.{}.w1", "experts.{}.w3", "experts.{}.w2")


def parse_config(fields: Fields) -> MoeConfig:
    """Read the config.json of a Mixtral.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    config = read_config(
        MoeConfig,
        "MixtralForCausalLM",
        fields,
        _DEFAULTS,
        experts=read_renormalised_experts(
            fields, count=8, top_k=2, size=_DEFAULTS.intermediate_size
        ),
        sparse=(True,) * read_num_layers(fields, _DEFAULTS.num_layers),
    )
    return with_windows(fields, config, read_window(fields, None))


def build(config: MoeConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with a mixture in each layer."""
    name = "mlp" if make.stacked_experts else "block_sparse_moe"
    layer = partial(make.pre_norm_layer, mlp_name=name)
    return make.decoder(config, layer, partial(make.experts, config, config.experts, each=_EACH))
