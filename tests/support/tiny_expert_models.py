"""Shapes of tiny models with experts, for `tiny_models`."""

from __future__ import annotations

from pagewire.tests.support.tiny_shapes import BIASES, GRANITE, SWITCHED, YARN, Families, rope

EXPERT_FAMILIES: Families = {
    "granitemoe": (
        "GraniteMoe",
        {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2},
        {
            "biases-one-of-three": {
                **BIASES,
                "num_local_experts": 3,
                "num_experts_per_tok": 1,
            },
            "multipliers-of-1": dict.fromkeys(GRANITE, 1.0) | {"attention_multiplier": 0.3},
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        {
            "own-head-size": {"num_key_value_heads": 2, "head_dim": 16},
            "window": {"num_key_value_heads": 2, "sliding_window": 11},
            "one-of-three": {
                "num_key_value_heads": 2,
                "num_local_experts": 3,
                "num_experts_per_tok": 1,
            },
        },
    ),
    "gptoss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "head_dim": 16,
            "swiglu_limit": 0.5,
            "rope_parameters": {**YARN, "truncate": False},
        },
        {
            "without-biases-own-gate": {
                "num_key_value_heads": 2,
                "attention_bias": False,
                "swiglu_alpha": 1.1,
            },
            "windows-by-layer": {
                "num_key_value_heads": 1,
                "sliding_window": 21,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
        },
    ),
    "qwen2moe": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        {
            "renormalised-without-biases": {
                "num_key_value_heads": 2,
                "norm_topk_prob": True,
                "qkv_bias": False,
            },
            "some-dense-layers": {"mlp_only_layers": [0], "num_key_value_heads": 2},
            "windows-in-lower-layers": {
                **SWITCHED,
                "num_hidden_layers": 5,
                "max_window_layers": 4,
            },
            "windows-by-layer": {
                **SWITCHED,
                "mlp_only_layers": [1],
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
        },
    ),
    "qwen3moe": (
        "Qwen3Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "head_dim": 16,
        },
        {
            "renormalised-biases": {**BIASES, "norm_topk_prob": True},
            "every-second-yarn": {**rope(**YARN), "decoder_sparse_step": 2},
            "windows": {**SWITCHED, "max_window_layers": 2, "norm_topk_prob": True},
        },
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2},
        {"renormalised-biases": {**BIASES, "norm_topk_prob": True}},
    ),
}
