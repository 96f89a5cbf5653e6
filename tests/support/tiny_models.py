"""Tiny models of every family, made by transformers' own classes, with random weights.

Each family has shapes with 1, 2, 4 and 7 query heads per KV head, tied and untied output heads, and
vocabularies of odd sizes, and shapes with biases and with what only the family has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.tests.support.hf_configs import config_class
from pagewire.tests.support.tiny_expert_models import EXPERT_FAMILIES
from pagewire.tests.support.tiny_latent_models import LATENT_FAMILIES
from pagewire.tests.support.tiny_shapes import BIASES, GRANITE, SWITCHED, YARN, Families, rope

VOCAB = 96  # of the smallest models: prompts for all models have tokens below it
POSITIONS = 256

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_COMMON: dict[str, dict[str, Any]] = {
    "groups-of-1-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "groups-of-2-odd-vocabulary": {"num_key_value_heads": 2, "vocab_size": 131},
    "groups-of-4-tied-odd-vocabulary": {
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "vocab_size": 97,
        "rms_norm_eps": 1e-3,
    },
    "groups-of-7": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _longrope(pairs: int, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 900.0,
        "short_factor": [1.0 + 0.13 * pair for pair in range(pairs)],
        "long_factor": [2.0 + 1.7 * pair for pair in range(pairs)],
        "original_max_position_embeddings": original,
    }


def _ropes(full: dict[str, Any], local_theta: float) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": local_theta}
    return {
        "num_key_value_heads": 2,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


_GEMMA3 = {
    "sliding_window": 8,
    "head_dim": 12,
    "query_pre_attn_scalar": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA3_SHAPES: dict[str, dict[str, Any]] = {
    "biases-and-cap": {**BIASES, "final_logit_softcapping": 20.0},
    "linear": _ropes({"rope_type": "linear", "rope_theta": 900.0, "factor": 2.5}, 70.0),
    "default-pattern": {
        "num_key_value_heads": 1,
        "num_hidden_layers": 7,
        "sliding_window": 21,
        "layer_types": None,
    },
    "windows-that-hide-nothing": {"num_key_value_heads": 2, "sliding_window": POSITIONS},
}
_VISIONS = {"gemma3images": "siglip_vision_model", "mistral3": "pixtral"}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_FAMILIES: Families = {
    "llama": (
        "Llama",
        {},
        {
            "biases": {**BIASES, "mlp_bias": True},
            "own-head-size": {"num_key_value_heads": 2, "head_dim": 20},
            "linear": rope(rope_type="linear", rope_theta=900.0, factor=2.5),
            "dynamic": rope(rope_type="dynamic", rope_theta=900.0, factor=3.7),
            "llama3": rope(**_LLAMA3),
            "yarn": rope(**YARN),
            "yarn-with-scales": rope(
                **YARN, mscale=0.7, mscale_all_dim=0.4, beta_fast=16, beta_slow=2
            ),
            "yarn-not-truncated": rope(**YARN, truncate=False, attention_factor=1.3),
            "longrope": rope(**_longrope(6, 200), factor=3.0),
        },
    ),
    "mistral": (
        "Mistral",
        {"sliding_window": None},
        {
            "own-head-size": {"num_key_value_heads": 2, "head_dim": 16},
            "window-groups-of-2": {"num_key_value_heads": 2, "sliding_window": 8},
            "window-groups-of-4-tied": {
                "num_key_value_heads": 1,
                "sliding_window": 21,
                "tie_word_embeddings": True,
            },
            "window-of-1": {"num_key_value_heads": 4, "sliding_window": 1},
        },
    ),
    "ministral": (
        "Ministral",
        {"sliding_window": POSITIONS, "head_dim": 12},  # its code cannot do without either
        {
            "full-by-layer": {
                "num_key_value_heads": 2,
                "sliding_window": 8,
                "layer_types": ["full_attention"] * 3,
            },
            "windows-by-layer": {
                "num_key_value_heads": 1,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "windows-in-all-layers": {"num_key_value_heads": 2, "sliding_window": 30},
        },
    ),
    "qwen2": (
        "Qwen2",
        {},
        {
            "yarn": rope(**YARN),
            "windows-in-upper-layers": {**SWITCHED, "max_window_layers": 1},
        },
    ),
    "qwen3": (
        "Qwen3",
        {"head_dim": 16},
        {
            "biases": BIASES,
            "head-of-12-yarn": {**rope(**YARN), "head_dim": 12},
            "windows-in-upper-layers": {**SWITCHED, "max_window_layers": 2},
            "windows-by-layer": {
                **SWITCHED,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        },
    ),
    "olmo2": ("Olmo2", {}, {"biases": BIASES, "llama3": rope(**_LLAMA3)}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {
            "biases": BIASES,
            "yarn": _ropes(YARN, 70.0),
            "default-pattern": {
                "num_key_value_heads": 1,
                "num_hidden_layers": 5,
                "sliding_window": 21,
                "layer_types": None,
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        # Caps that matter, and windows shorter than prompts and answers.
        {
            "sliding_window": 8,
            "head_dim": 12,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 20.0,
        },
        {
            "biases-without-caps": {
                **BIASES,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
            },
            "windows-by-layer": {
                "num_key_value_heads": 2,
                "sliding_window": 21,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "own-head-size-yarn": {**rope(**YARN), "head_dim": 20},
        },
    ),
    "gemma3": ("Gemma3", _GEMMA3, _GEMMA3_SHAPES),
    "gemma3images": (
        "Gemma3ForConditionalGeneration",
        _GEMMA3,
        {"linear": _GEMMA3_SHAPES["linear"]},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None},
        {"own-head-size": {"num_key_value_heads": 2, "head_dim": 16}},
    ),
    "granite": (
        "Granite",
        GRANITE,
        {
            "biases": {**BIASES, "mlp_bias": True},
            "multipliers-of-1": dict.fromkeys(GRANITE, 1.0) | {"attention_multiplier": 0.3},
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 56,
            "layer_types": ["full_attention"] * 3,
            "mamba_n_heads": 1,
            "position_embedding_type": "rope",
        },
        {"biases-not-rotated": {**BIASES, "position_embedding_type": None}},
    ),
    "cohere": (
        "Cohere",
        {"logit_scale": 0.25, "layer_norm_eps": 1e-3},
        {
            "biases": BIASES,
            "linear": rope(rope_type="linear", rope_theta=900.0, factor=2.5),
        },
    ),
    "cohere2": (
        "Cohere2",
        {"logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 5},
        {
            "biases": BIASES,
            "windows-by-layer": {
                "num_key_value_heads": 1,
                "num_hidden_layers": 3,
                "sliding_window": 21,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "windows-that-hide-nothing": {"num_key_value_heads": 2, "sliding_window": POSITIONS},
        },
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 5},
        {
            "biases": {**BIASES, "mlp_bias": True},
            "rotation-by-layer": {"no_rope_layers": [0, 1, 0, 0, 1]},
            "windows-without-rotation": {**SWITCHED, "no_rope_layer_interval": 2},
            "every-second-yarn": {**rope(**YARN), "no_rope_layer_interval": 2},
        },
    ),
    "phi3": (
        "Phi3",
        {"original_max_position_embeddings": POSITIONS},
        {
            "part-of-a-head": {"partial_rotary_factor": 0.5, "num_key_value_heads": 2},
            "window": {"num_key_value_heads": 2, "sliding_window": 11},
            "longrope": {
                **rope(**_longrope(6, 128)),
                "original_max_position_embeddings": 128,
            },
            "longrope-of-a-part": {
                **rope(**_longrope(6, 200)),
                "hidden_size": 64,
                "original_max_position_embeddings": 200,
                "partial_rotary_factor": 0.75,
                "sliding_window": 260,
            },
        },
    ),
    **EXPERT_FAMILIES,
    **LATENT_FAMILIES,
}
ARCHITECTURE_OF = {
    family: kind if "For" in kind else f"{kind}ForCausalLM"
    for family, (kind, _, _) in _FAMILIES.items()
}
CASES = {
    f"{family}-{shape}": (family, shape)
    for family, (_, _, own) in _FAMILIES.items()
    for shape in (*_COMMON, *own)
}


def write_tiny_model(path: Path, family: str, shape: str, **changes: Any) -> Any:
    """Save a model of a shape, and return Hugging Face's model object."""
    _, always, own = _FAMILIES[family]
    fields = {**_SIZES, **always, **({**_COMMON, **own}[shape]), **changes}
    if family in LATENT_FAMILIES:
        fields["num_key_value_heads"] = fields["num_attention_heads"]  # that of the common shapes
    if family in _VISIONS:
        tied = fields["tie_word_embeddings"]
        vision = {**_VISION, "model_type": _VISIONS[family]}
        fields = {"text_config": fields, "vision_config": vision, "tie_word_embeddings": tied}
    config = config_class(ARCHITECTURE_OF[family])(**fields)
    # Eager attention has caps and sinks; some releases choose another one, which ignores them.
    config._attn_implementation = "eager"
    model = getattr(transformers, ARCHITECTURE_OF[family])(config).eval()
    set_gates(model)
    randomise(model)
    model.save_pretrained(path)
    return model


@dataclass(frozen=True)
class Pair:
    """One checkpoint, loaded by Hugging Face and by us."""

    theirs: Any
    ours: DecoderModel

    @torch.inference_mode()
    def expected(self, token_ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.theirs(torch.tensor([token_ids])).logits[0]  # [T, vocab]
        return logits


def set_gates(model: torch.nn.Module) -> None:
    """Set gpt-oss's fields that older releases of transformers do not read from config.json."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            vars(module).update(
                alpha=getattr(model.config, "swiglu_alpha", 1.702),
                limit=getattr(model.config, "swiglu_limit", 7.0),
            )


def randomise(model: torch.nn.Module) -> None:
    """Give every parameter, biases and norms included, a value that matters."""
    generator = torch.Generator().manual_seed(7)
    biases = [item for item in model.named_buffers() if item[0].endswith("correction_bias")]
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *biases):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
