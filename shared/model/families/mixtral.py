"""Mixtral: a Mistral whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.kernels.routing import Routing
from pagewire.shared.model.experts_config import (
    ExpertsConfig,
    MoeConfig,
    chosen_count,
    expert_count,
)
from pagewire.shared.model.fields import MAX_WIDTH, Fields
from pagewire.shared.model.model_config import Defaults, read_config, read_num_layers
from pagewire.shared.model.windows import read_window, with_windows

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
    vocab_size=32_000,
    intermediate_size=14_336,
    max_position_embeddings=131_072,
    special_tokens=(1, 2),
    num_kv_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
)
_EACH = ("experts.{}.w1.weight", "experts.{}.w3.weight", "experts.{}.w2.weight")


def parse_config(fields: Fields) -> MoeConfig:
    """Read the config.json of a Mixtral.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    count = expert_count(fields, ("num_local_experts", "num_experts"), 8)
    experts = ExpertsConfig(
        count,
        fields.positive_int("intermediate_size", _DEFAULTS.intermediate_size, MAX_WIDTH),
        Routing(top_k=chosen_count(fields, count, 2), renormalise=True),
    )
    config = read_config(
        MoeConfig,
        "MixtralForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        experts=experts,
        sparse=(True,) * read_num_layers(fields, _DEFAULTS.num_layers),
    )
    window = read_window(fields, None)
    return with_windows(fields, config, window, [window is not None] * config.num_layers)


def build(config: MoeConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Llama with a mixture in each layer."""
    cos_sin = make.cos_sin(config)
    layers = [
        make.pre_norm_layer(
            config,
            make.attention(config, cos_sin, window=window),
            make.experts(config, config.experts, each=_EACH),
            mlp_name="mlp" if make.stacked_experts else "block_sparse_moe",
        )
        for window in config.windows
    ]
    return make.model(config, layers)
