"""What the families' configurations have of their own, and refusals of what cannot be exact."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.families import ARCHITECTURES
from pagewire.shared.model.fields import MAX_COUNT, MAX_TOKENS, MAX_WIDTH, Fields
from pagewire.shared.model.model_config import MAX_LAYERS
from pagewire.shared.model.rope_config import ROPE_TYPES
from pagewire.tests.support.hf_configs import default_content


def _write(path: Path, content: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(content))
    return path


def _llama(**fields: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **fields}


PHI_4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [9.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_chooses_its_factors_by_the_length_that_is_served(
    tmp_path: Path, name: str
) -> None:
    rope = {**PHI_4_MINI["rope_scaling"], "type": name}
    config = load_config(_write(tmp_path, {**PHI_4_MINI, "rope_scaling": rope}))
    assert config.max_position_embeddings == 131072
    assert config.rope.rope_type == "longrope"
    assert config.rope.is_long(131072) and config.rope.is_long(4097)
    assert not config.rope.is_long(4096)
    assert config.rope.rotated(config.head_dim) == 96
    assert config.rope.amplitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_yarn_lengthens_the_context_that_the_file_names(tmp_path: Path) -> None:
    """As Qwen's model cards have it: the rotary parameters are added, the length stays."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    content = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
    config = load_config(_write(tmp_path, {**content, "rope_scaling": rope}))
    assert config.max_position_embeddings == 131072


@pytest.mark.parametrize(
    "content",
    [
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 32768,
            "max_position_embeddings": 32768,
        },
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 10, "use_sliding_window": False},
        PHI_4_MINI,
    ],
    ids=["mistral-as-long", "qwen2-switched-off", "phi3-longer"],
)
def test_a_window_that_hides_nothing_is_full_attention(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    config = load_config(_write(tmp_path, content))
    assert config.windows == (None,) * config.num_layers


_WINDOWS = {
    "mistral-in-all-layers": (
        {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 3},
        (4096, 4096, 4096),
    ),
    "mistral-by-layer": (
        {
            "architectures": ["MistralForCausalLM"],
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "attention"],
        },
        (None, 4096, None),
    ),
    "mistral-without-an-output-head-by-layer": (
        {"architectures": ["MistralModel"], "num_hidden_layers": 1, "layer_types": ["attention"]},
        (None,),
    ),
    "llama-as-long-as-the-context": (
        _llama(num_hidden_layers=1, sliding_window=2048, max_position_embeddings=2048),
        (None,),
    ),
    "llama-full-by-layer": (
        _llama(num_hidden_layers=1, sliding_window=8, layer_types=["full_attention"]),
        (None,),
    ),
    "ministral-by-layer": (
        {
            "architectures": ["MinistralForCausalLM"],
            "num_hidden_layers": 3,
            "sliding_window": 100,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        (None, 100, None),
    ),
    "qwen2-in-upper-layers": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 100,
            "max_window_layers": 1,
        },
        (None, 100, 100),
    ),
    "smollm3-where-nothing-is-rotated": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
        (None, None, None, 7),
    ),
    "phi3-one-shorter-than-the-context": (
        {"architectures": ["Phi3ForCausalLM"], "num_hidden_layers": 2, "sliding_window": 4095},
        (4095, 4095),
    ),
    "mixtral-in-all-layers": (
        {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2, "sliding_window": 4096},
        (4096, 4096),
    ),
    "qwen2-moe-in-every-second-of-the-first": (
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "num_hidden_layers": 6,
            "use_sliding_window": True,
            "sliding_window": 100,
            "max_window_layers": 4,
        },
        (100, None, 100, None, None, None),
    ),
    "cohere2-in-three-of-four": (
        {"architectures": ["Cohere2ForCausalLM"], "num_hidden_layers": 5},
        (4096, 4096, 4096, None, 4096),
    ),
    "qwen2-moe-switched-off": (
        {"architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 2, "sliding_window": 100},
        (None, None),
    ),
    "qwen3-moe-in-all-layers": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 2,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
        (4096, 4096),
    ),
}


@pytest.mark.parametrize(("content", "windows"), _WINDOWS.values(), ids=_WINDOWS)
def test_windows_of_layers(
    tmp_path: Path, content: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert load_config(_write(tmp_path, content)).windows == windows


REFUSED = {
    "experts": (
        {"architectures": ["PhimoeForCausalLM"]},
        "PhimoeForCausalLM is not supported: it has a mixture of experts of another kind",
    ),
    "more-experts-than-there-are": (
        {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
        "num_experts_per_tok (9) is more than the 8 experts",
    ),
    "dense-layers-by-text": (
        {"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": ["0"]},
        "mlp_only_layers must be a list of layers from 0, not ['0']",
    ),
    "cohere-with-norms-of-heads": (
        {"architectures": ["CohereForCausalLM"], "use_qk_norm": True},
        "use_qk_norm is not supported; --model-impl transformers runs the model",
    ),
    "granite4-with-experts": (
        {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 64},
        "num_local_experts is not 0: Granite 4 is supported without experts",
    ),
    "granite4-with-states": (
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "num_local_experts": 0,
            "num_hidden_layers": 2,
            "layer_types": ["attention", "mamba"],
        },
        "layer_types has 'mamba': layers that keep a state other than keys and values are not",
    ),
    "granite4-without-kinds-of-layers": (
        {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0},
        "layer_types must be a list of 32 kinds of layers",
    ),
    "olmoe-clipped": (
        {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0},
        "clip_qkv is not supported",
    ),
    "layer-types-of-another-length": (
        {
            "architectures": ["MinistralForCausalLM"],
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "layer_types must be a list of 32 kinds of attention",
    ),
    "another-kind-of-attention": (
        {"architectures": ["MinistralForCausalLM"], "layer_types": ["chunked_attention"] * 32},
        "layer_types has 'chunked_attention', which is not supported; only sliding_attention and",
    ),
    "phi3-with-a-window-of-none": (
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 0},
        "sliding_window must be a positive integer, not 0",
    ),
    "llama-with-a-window": (
        _llama(sliding_window=2047, max_position_embeddings=2048),
        "sliding_window is 2047, but this architecture has full attention: set it to null",
    ),
    "llama-with-windows-by-layer": (
        _llama(layer_types=["sliding_attention"] * 32),
        "layer_types has sliding_attention, which this architecture does not have",
    ),
    "smollm3-with-windows-by-layer": (
        {"architectures": ["SmolLM3ForCausalLM"], "layer_types": ["sliding_attention"] * 36},
        "layer_types has sliding_attention, but no sliding_window is in use",
    ),
    "smollm3-flags": (
        {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1]},
        "no_rope_layers must be 36 numbers that are 0 or 1",
    ),
    "phi3-other-rope-type": (
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2}},
        "rope type 'linear' is not supported in a Phi-3; supported are default, longrope",
    ),
    "yarn-of-a-tiny-context": (
        _llama(
            rope_parameters={
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 1,
            }
        ),
        "original_max_position_embeddings must be above 1 for rope type 'yarn'",
    ),
    "longrope-of-another-length": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        },
        "short_factor has 1 numbers; it must have 48",
    ),
    "longrope-without-long-factors": (
        _llama(head_dim=2, rope_scaling={"type": "longrope", "short_factor": [1.0]}),
        "long_factor is missing",
    ),
    "longrope-with-text": (
        _llama(rope_scaling={"type": "longrope", "short_factor": ["a"]}),
        "short_factor must be a positive number, not 'a'",
    ),
    "odd-part-of-a-head": (
        {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.01},
        "partial_rotary_factor 0.01 of head_dim 96 leaves no pairs to rotate",
    ),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_config(_write(tmp_path, content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG_VALUES = [None, True, -1, 0, 1, 1.5, 10**400, "x", [], [[]], [None], {}, {"a": {}}]
ROPE_FIELDS = {
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 64,
    "long_factor": [1.0] * 64,
    "attention_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "partial_rotary_factor": 1.0,
}


def _read_or_refuse(architecture: str, content: dict[str, Any]) -> None:
    try:
        ARCHITECTURES[architecture].parse_config(Fields(content, "config.json"))
    except ModelLoadError as exc:
        assert "\n" not in str(exc)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_value_of_any_field_is_read_or_refused(architecture: str) -> None:
    content = default_content(architecture)
    for name in (*content, "rope_scaling", "quantization_config", "layer_types"):
        for value in WRONG_VALUES:
            _read_or_refuse(architecture, {**content, name: value})


LARGEST = {
    "num_hidden_layers": MAX_LAYERS,
    "hidden_size": MAX_WIDTH,
    "intermediate_size": MAX_WIDTH,
    "moe_intermediate_size": MAX_WIDTH,
    "shared_expert_intermediate_size": MAX_WIDTH,
    "shared_intermediate_size": MAX_WIDTH,
    "kv_lora_rank": MAX_WIDTH,
    "qk_rope_head_dim": MAX_WIDTH,
    "num_attention_heads": MAX_COUNT,
    "num_local_experts": MAX_COUNT,
    "n_routed_experts": MAX_COUNT,
    "vocab_size": MAX_TOKENS,
    "max_position_embeddings": MAX_TOKENS,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sizes_are_bounded(architecture: str) -> None:
    """Before a list or a table of that size is made."""
    content = default_content(architecture)
    part = content.get("text_config", content)
    for name, most in LARGEST.items():
        if name in part:
            changed = {**part, name: most + 1}
            fields = {**content, "text_config": changed} if part is not content else changed
            with pytest.raises(ModelLoadError, match=f"{name} must be at most {most}, not"):
                ARCHITECTURES[architecture].parse_config(Fields(fields, "config.json"))


def test_a_factor_of_yarn_that_says_too_much() -> None:
    rope = {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 4096}
    config = ARCHITECTURES["LlamaForCausalLM"].parse_config(Fields(_llama(rope_scaling=rope), ""))
    assert config.max_position_embeddings == MAX_TOKENS


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_any_value_of_any_rotary_field_is_read_or_refused(tmp_path: Path, rope_type: str) -> None:
    rope = {**ROPE_FIELDS, "rope_type": rope_type, "rope_theta": 10_000.0}
    assert load_config(_write(tmp_path, _llama(rope_parameters=rope))).rope.rope_type == rope_type
    for name in rope:
        for value in WRONG_VALUES:
            _read_or_refuse("LlamaForCausalLM", {"rope_parameters": {**rope, name: value}})
