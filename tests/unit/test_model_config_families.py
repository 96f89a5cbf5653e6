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
from pagewire.shared.model.fields import Fields
from pagewire.shared.model.rope_config import ROPE_TYPES


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
