"""Shapes of tiny models with latent attention, for `tiny_models`."""

from __future__ import annotations

from pagewire.tests.support.tiny_shapes import YARN, Families

_LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT_FAMILIES: Families = {
    "deepseekv2": (
        "DeepseekV2",
        _LATENT,
        {
            "query-latents-biases": {"q_lora_rank": 20, "attention_bias": True, "mlp_bias": True},
            "lite-yarn": {
                "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
                "topk_method": "greedy",
                "n_shared_experts": 2,
            },
            "yarn-with-other-scales": {
                "q_lora_rank": 28,
                "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.4},
            },
            "groups-of-experts": {
                "topk_method": "group_limited_greedy",
                "n_group": 3,
                "topk_group": 2,
                "routed_scaling_factor": 16.0,
                "first_k_dense_replace": 0,
            },
        },
    ),
    "deepseekv3": (
        "DeepseekV3",
        {**_LATENT, "n_group": 3, "topk_group": 2, "q_lora_rank": 20, "n_shared_experts": 1},
        {
            "biases-halves-rotated": {"attention_bias": True, "rope_interleave": False},
            "yarn-without-query-latents": {
                "q_lora_rank": None,
                "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
            "one-group-not-renormalised": {
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": False,
                "routed_scaling_factor": 1.7,
            },
            "all-dense": {"first_k_dense_replace": 3},
        },
    ),
}
