"""Qwen3-MoE: a Qwen3 with mixtures of experts."""

from __future__ import annotations

from pagewire.shared.model.experts_config import MoeConfig, read_experts, sparse_layers
from pagewire.shared.model.fields import MAX_WIDTH, Fields
from pagewire.shared.model.model_config import Defaults, read_config, read_num_layers
from pagewire.shared.model.windows import switched_window, with_windows

_DEFAULTS = Defaults(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=24,
    num_heads=32,
    num_kv_heads=4,
    max_position_embeddings=32_768,
    special_tokens=(None, None),
)
_WINDOW = 4096


def parse_config(fields: Fields) -> MoeConfig:
    """Read the config.json of a Qwen3-MoE.

    Raises:
        ModelLoadError: a field is wrong, or a variant is not supported; one line.
    """
    experts = read_experts(
        fields,
        count=128,
        top_k=8,
        size=fields.positive_int("moe_intermediate_size", 768, MAX_WIDTH),
    )
    config = read_config(
        MoeConfig,
        "Qwen3MoeForCausalLM",
        fields,
        _DEFAULTS,
        experts=experts,
        sparse=sparse_layers(fields, read_num_layers(fields, _DEFAULTS.num_layers)),
    )
    # In all layers: Hugging Face's code does not use `max_window_layers` here.
    return with_windows(fields, config, switched_window(fields, _WINDOW))
