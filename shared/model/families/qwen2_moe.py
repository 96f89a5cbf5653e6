"""Qwen1.5-MoE and Qwen2-MoE: a Qwen2 with mixtures and a shared expert."""

from __future__ import annotations

from functools import partial

from pagewire.shared.model.experts_config import MoeConfig, read_experts, sparse_layers
from pagewire.shared.model.families.annotations import DecoderModel, LayerFactory
from pagewire.shared.model.fields import MAX_WIDTH, Fields
from pagewire.shared.model.model_config import Defaults, read_config, read_num_layers
from pagewire.shared.model.windows import switched_window, with_some_windows

_DEFAULTS = Defaults(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=24,
    num_heads=16,
    num_kv_heads=16,
    max_position_embeddings=32_768,
    special_tokens=(None, None),
    attention_bias=None,
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
    config = read_config(
        MoeConfig,
        "Qwen2MoeForCausalLM",
        fields,
        _DEFAULTS,
        qkv_bias=fields.flag("qkv_bias", True),
        experts=experts,
        sparse=sparse_layers(fields, read_num_layers(fields, _DEFAULTS.num_layers)),
    )
    window = switched_window(fields, _WINDOW)
    last = fields.whole_number("max_window_layers", _WINDOW_LAYERS)
    return with_some_windows(
        fields,
        config,
        window,
        lambda index: window is not None and index % 2 == 0 and index < last,
    )


def build(config: MoeConfig, make: LayerFactory) -> DecoderModel:
    """Compose a Qwen2 whose sparse layers have mixtures with a gated shared expert."""
    mixture = partial(make.with_shared_expert, config, "shared_expert", gate="shared_expert_gate")
    return make.decoder(config, mlp=mixture)
