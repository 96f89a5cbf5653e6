"""Tiny models that run by transformers' code, made by transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from pagewire.tests.support.tiny_models import POSITIONS, VOCAB, randomise

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_HEAD = {"head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "sliding_window": None}
# Architecture -> fields of its configuration in addition to the sizes.
SERVED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "StableLmForCausalLM": {"partial_rotary_factor": 0.25, "use_qkv_bias": True},
    "GPTNeoXForCausalLM": {"num_key_value_heads": 4},
    "Starcoder2ForCausalLM": {"sliding_window": None},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "CohereForCausalLM": {"logit_scale": 0.25, "use_qk_norm": True},
    "GlmForCausalLM": _HEAD,
    "Glm4ForCausalLM": _HEAD,
    "NemotronForCausalLM": _HEAD,
    "OlmoForCausalLM": {"clip_qkv": 2.0},
    "GemmaForCausalLM": {"head_dim": 24},
    "HeliumForCausalLM": _HEAD,
    "SeedOssForCausalLM": _HEAD,
    "ArceeForCausalLM": {"num_key_value_heads": 1},
    "Exaone4ForCausalLM": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "Starcoder2ForCausalLM-windows": {"sliding_window": 9},
    "Cohere2ForCausalLM": {"sliding_window": 11, "num_hidden_layers": 5, "logit_scale": 0.25},
    "Exaone4ForCausalLM-windows": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "MixtralForCausalLM": {**_EXPERTS, "num_local_experts": 4},
    "PhimoeForCausalLM": {
        **_EXPERTS,
        "num_local_experts": 4,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "Qwen3MoeForCausalLM": {**_HEAD, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
    "GPT2LMHeadModel": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": POSITIONS},
}


def write_tiny(path: Path, architecture: str, **changes: Any) -> Any:
    """Save a model of an architecture, and return Hugging Face's model object.

    Args:
        path: the model's directory.
        architecture: a key of `SERVED`, or any other class of transformers.
        changes: changed fields of its configuration.
    """
    kind = getattr(transformers, architecture.partition("-")[0])
    sizes = _SIZES
    if architecture.startswith("GPT2"):  # the sizes have other names
        sizes = {name: _SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = kind.config_class(**{**sizes, **SERVED.get(architecture, {}), **changes})
    model = kind._from_config(config, dtype=torch.float32).eval()
    randomise(model)
    model.save_pretrained(path)
    return model
