"""Qwen1.5-MoE and Qwen2-MoE: a Qwen2 with mixtures and a shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.shared.model.experts_config import MoeConfig, read_experts, sparse_layers
from pagewire.shared.model.fields import MAX_WIDTH, Fields
from pagewire.shared.model.model_config import Defaults, read_config, read_num_layers
from pagewire.shared.model.windows import sliding_layers, switched_window, with_windows

if TYPE_CHECKING:
    from pagewire.shared.model.layers.decoder import DecoderModel
    from pagewire.shared.model.layers.experts import WithSharedExpert
    from pagewire.shared.model.layers.factory import LayerFactory

_DEFAULTS = Defaults(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=24,
    num_heads=16,
    num_kv_heads=16,
    max_position_embeddings=32_768,
    special_tokens=(None, None),
)
_WINDOW = 4096
_WINDOW_LAYERS = 28  # of these first layers, every second one has a window


def parse_config(fields: Fields) -> MoeConfig:
    """Read the config.json of a Qwen2-MoE.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    experts = read_experts(
        fields,
        count=60,
        top_k=4,
        size=fields.positive_int("moe_intermediate_size", 1408, MAX_WIDTH),
        shared_size=fields.positive_int("shared_expert_intermediate_size", 5632, MAX_WIDTH),
    )
    layers = read_num_layers(fields, _DEFAULTS.num_layers)
    config = read_config(
        MoeConfig,
        "Qwen2MoeForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=fields.flag("qkv_bias", True),
        o_bias=False,
        mlp_bias=False,
        experts=experts,
        sparse=sparse_layers(fields, layers),
    )
    return _with_windows(fields, config)


def _with_windows(fields: Fields, config: MoeConfig) -> MoeConfig:
    """Return the configuration with the window, if it is enabled, in every second layer."""
    window = switched_window(fields, _WINDOW)
    last = fields.whole_number("max_window_layers", _WINDOW_LAYERS)
    sliding = sliding_layers(
        fields,
        config.num_layers,
        lambda index: window is not None and index % 2 == 0 and index < last,
    )
    return with_windows(fields, config, window, sliding)


def build(config: MoeConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Qwen2 whose sparse layers have mixtures with a gated shared expert."""
    cos_sin = make.cos_sin(config)
    layers = [
        make.pre_norm_layer(
            config,
            make.attention(config, cos_sin, window=window),
            _mixture(config, make) if is_sparse else make.mlp(config),
        )
        for is_sparse, window in zip(config.sparse, config.windows, strict=True)
    ]
    return make.model(config, layers)


def _mixture(config: MoeConfig, make: LayerFactory) -> WithSharedExpert:
    return make.with_shared_expert(
        config,
        make.experts(config, config.experts),
        config.experts.shared_size,
        "shared_expert",
        gate="shared_expert_gate",
    )
