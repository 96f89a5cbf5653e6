"""What the families' configurations have of their own, and refusals of what cannot be exact."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from pagewire.shared.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.families import ARCHITECTURES
from pagewire.shared.model.families.gemma2 import Gemma2Config
from pagewire.shared.model.families.gemma3 import Gemma3Config
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.rope_config import ROPE_TYPES, RopeConfig


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
def test_longrope_serves_the_original_context(tmp_path: Path, name: str) -> None:
    """Past it all positions turn otherwise: keys that are cached would have to change."""
    rope = {**PHI_4_MINI["rope_scaling"], "type": name}
    config = load_config(_write(tmp_path, {**PHI_4_MINI, "rope_scaling": rope}))
    assert config.max_position_embeddings == 4096
    assert config.rope.rope_type == "longrope"
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
    "gemma2-every-other": (
        {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3},
        (4096, None, 4096),
    ),
    "gemma3-all-but-each-sixth": (
        {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7},
        (4096, 4096, 4096, 4096, 4096, None, 4096),
    ),
    "gemma3-by-another-pattern": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 4,
            "sliding_window": 512,
            "sliding_window_pattern": 2,
        },
        (512, None, 512, None),
    ),
    "phi3-one-shorter-than-the-context": (
        {"architectures": ["Phi3ForCausalLM"], "num_hidden_layers": 2, "sliding_window": 4095},
        (4095, 4095),
    ),
}


@pytest.mark.parametrize(("content", "windows"), _WINDOWS.values(), ids=_WINDOWS)
def test_windows_of_layers(
    tmp_path: Path, content: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert load_config(_write(tmp_path, content)).windows == windows


GEMMA_2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
}


def test_caps_and_scale_of_gemma_2(tmp_path: Path) -> None:
    """A missing cap has its default, a null is none."""
    config = load_config(_write(tmp_path, GEMMA_2_9B))
    assert isinstance(config, Gemma2Config)
    assert (config.scores_cap, config.logits_cap) == (50.0, 30.0)
    assert config.attention_multiplier == 1 / 16
    named = {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 144}
    config = load_config(_write(tmp_path, {**named, "attn_logit_softcapping": None}))
    assert isinstance(config, Gemma2Config)
    assert (config.scores_cap, config.logits_cap) == (None, 30.0)
    assert config.attention_multiplier == 1 / 12


GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def test_text_model_of_gemma_3(tmp_path: Path) -> None:
    """As it was published: what it has of its own, and what the outer object says."""
    config = load_config(_write(tmp_path, GEMMA_3_4B))
    assert isinstance(config, Gemma3Config)
    assert (config.hidden_size, config.num_heads, config.head_dim) == (2560, 8, 256)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    assert config.tie_word_embeddings
    assert config.rope == RopeConfig("linear", 1_000_000.0, 8.0)
    assert config.local_rope == RopeConfig(theta=10_000.0)
    assert config.windows == (*((*(1024,) * 5, None) * 5), *(1024,) * 4)


def test_angles_of_an_older_gemma_3(tmp_path: Path) -> None:
    older = {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "rope_scaling": None}
    content = {"architectures": ["Gemma3ForCausalLM"], **older}
    config = load_config(_write(tmp_path, content))
    assert isinstance(config, Gemma3Config)
    assert (config.rope.theta, config.local_rope.theta) == (5000.0, 300.0)


REFUSED = {
    "experts": (
        {"architectures": ["GraniteMoeForCausalLM"]},
        "GraniteMoeForCausalLM is not supported (it has a mixture of experts); supported are",
    ),
    "more-experts-than-there-are": (
        {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
        "num_experts_per_tok (9) is more than the 8 experts",
    ),
    "dense-layers-by-text": (
        {"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": ["0"]},
        "mlp_only_layers must be a list of layers from 0, not ['0']",
    ),
    "gemma2-without-length": (
        {"architectures": ["Gemma2ForCausalLM"], "sliding_window": None},
        "layer_types has sliding_attention, but no sliding_window is in use",
    ),
    "gemma2-other-activation": (
        {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "silu"},
        "hidden_activation 'silu' is not supported; only 'gelu_pytorch_tanh'",
    ),
    "gemma2-attends-to-later-tokens": (
        {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
        "use_bidirectional_attention is not supported",
    ),
    "gemma2-cap-of-nothing": (
        {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": 0},
        "final_logit_softcapping must be a positive number, not 0",
    ),
    "gemma3-one-set-of-angles": (
        {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e4}},
        "rope_parameters must have a set for each of sliding_attention and full_attention",
    ),
    "gemma3-scaled-windows": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        },
        "rope type 'linear' of sliding_attention is not supported; only 'default'",
    ),
    "gemma3-text-of-nothing": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 4},
        "text_config must be an object, not 4",
    ),
    "gemma3-quantised": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "quantization_config": {"bits": 4},
        },
        "quantised checkpoints are not supported",
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


# Where it is not that of the architecture's name.
_CONFIG_OF = {
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma3ForConditionalGeneration": "Gemma3Config",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_value_of_any_field_is_read_or_refused(architecture: str) -> None:
    name = _CONFIG_OF.get(architecture, architecture.replace("ForCausalLM", "Config"))
    content = getattr(transformers, name)().to_dict()
    for name in (*content, "rope_scaling", "quantization_config", "layer_types"):
        for value in WRONG_VALUES:
            _read_or_refuse(architecture, {**content, name: value})


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_any_value_of_any_rotary_field_is_read_or_refused(tmp_path: Path, rope_type: str) -> None:
    rope = {**ROPE_FIELDS, "rope_type": rope_type, "rope_theta": 10_000.0}
    assert load_config(_write(tmp_path, _llama(rope_parameters=rope))).rope.rope_type == rope_type
    for name in rope:
        for value in WRONG_VALUES:
            _read_or_refuse("LlamaForCausalLM", {"rope_parameters": {**rope, name: value}})
