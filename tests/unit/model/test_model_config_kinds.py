"""Configurations of families with layers of two kinds: their windows, angles, caps and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.kernels.gated_silu import GatedSilu
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.experts_config import MoeConfig
from pagewire.shared.model.rope_config import RopeConfig


def _write(path: Path, content: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(content))
    return path


_WINDOWS = {
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
    "olmo3-all-but-each-fourth": (
        {
            "architectures": ["Olmo3ForCausalLM"],
            "num_hidden_layers": 5,
            "max_position_embeddings": 8192,
        },
        (4096, 4096, 4096, None, 4096),
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
    assert (config.scores_cap, config.logits_cap) == (50.0, 30.0)
    assert config.score_scale == 1 / 16
    named = {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 144}
    config = load_config(_write(tmp_path, {**named, "attn_logit_softcapping": None}))
    assert (config.scores_cap, config.logits_cap) == (None, 30.0)
    assert config.score_scale == 1 / 12


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
    assert (config.hidden_size, config.num_heads, config.head_dim) == (2560, 8, 256)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    assert config.tie_word_embeddings
    assert config.rope == RopeConfig("linear", 1_000_000.0, 8.0)
    assert config.ropes[:6] == (*(RopeConfig(theta=10_000.0),) * 5, config.rope)
    assert config.windows == (*((*(1024,) * 5, None) * 5), *(1024,) * 4)


def test_angles_of_olmo_3(tmp_path: Path) -> None:
    """As it was published: only layers of full attention reach further.

    Hugging Face's code does not give the older base to the others, either.
    """
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    content = {"architectures": ["Olmo3ForCausalLM"], "max_position_embeddings": 65536}
    older = {"rope_theta": 400_000, "rope_scaling": {**yarn, "attention_factor": 1.2}}
    config = load_config(_write(tmp_path, {**content, **older}))
    assert (config.rope.rope_type, config.rope.factor, config.rope.amplitude) == ("yarn", 8.0, 1.2)
    assert config.rope.theta == 400_000
    assert config.ropes[:4] == (*(RopeConfig(theta=500_000),) * 3, config.rope)
    assert config.max_position_embeddings == 65536


def test_angles_of_an_older_gemma_3(tmp_path: Path) -> None:
    older = {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "rope_scaling": None}
    content = {"architectures": ["Gemma3ForCausalLM"], **older}
    config = load_config(_write(tmp_path, content))
    assert [rope and rope.theta for rope in config.ropes[4:6]] == [300.0, 5000.0]
    assert config.rope.theta == 5000.0


GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "experts_per_token": 4,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "initial_context_length": 4096,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16",
}


def test_gpt_oss(tmp_path: Path) -> None:
    """Its rotary parameters are also those of a file without them."""
    config = load_config(_write(tmp_path, GPT_OSS_20B))
    assert isinstance(config, MoeConfig)
    assert config.windows == (128, None) * 12
    assert (config.experts.count, config.experts.routing.top_k) == (32, 4)
    assert config.experts.activation == GatedSilu(1.702, up_offset=1.0, limit=7.0)
    assert (config.rope.rope_type, config.rope.factor, config.rope.truncate) == (
        "yarn",
        32.0,
        False,
    )
    assert config.max_position_embeddings == 131072
    without = {name: value for name, value in GPT_OSS_20B.items() if not name.startswith("rope_")}
    assert load_config(_write(tmp_path, without)).rope == config.rope


REFUSED = {
    "gpt-oss-quantised-otherwise": (
        {**GPT_OSS_20B, "quantization_config": {"quant_method": "mxfp6"}},
        "quant_method 'mxfp6' is not supported; supported are checkpoints in FP8 "
        "(quant_method fp8, compressed-tensors, modelopt), INT4 (awq, gptq, compressed-tensors) "
        "or, of gpt-oss, MXFP4 (mxfp4), and unquantised ones, which --quantization fp8 quantises "
        "while they are loaded",
    ),
    "gpt-oss-more-experts-than-there-are": (
        {**GPT_OSS_20B, "num_experts_per_tok": 33},
        "num_experts_per_tok (33) is more than the 32 experts",
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
    "olmo3-older-name-of-a-type": (
        {
            "architectures": ["Olmo3ForCausalLM"],
            "rope_scaling": {"type": "linear", "factor": 8.0},
        },
        "rope_scaling has a type, which Hugging Face's code overlooks in this architecture: call "
        "it rope_type",
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
        "names no quant_method; supported are checkpoints in FP8",
    ),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_config(_write(tmp_path, content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
