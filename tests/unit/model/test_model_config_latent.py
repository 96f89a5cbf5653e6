"""Configurations of models with latent attention: what was published, Hugging Face's, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from pagewire.kernels import load_ops
from pagewire.kernels.routing import Routing
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.kv.kv_layout import CachedToken
from pagewire.shared.kv.storage import allocate_pool
from pagewire.shared.model.config import load_config
from pagewire.shared.model.experts_config import ExpertsConfig
from pagewire.shared.model.latent_config import LatentConfig
from pagewire.shared.model.loader import load_model
from pagewire.shared.settings.config import WorkerSettings
from pagewire.shared.worker.estimate import estimate, weight_bytes
from pagewire.tests.support.tiny_models import write_tiny_model

CPU = torch.device("cpu")
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 8, "topk_group": 4}


def _read(path: Path, content: dict[str, Any]) -> LatentConfig:
    (path / "config.json").write_text(json.dumps(content))
    config = load_config(path)
    assert isinstance(config, LatentConfig)
    return config


def test_deepseek_v2_lite_as_published(tmp_path: Path) -> None:
    config = _read(tmp_path, V2_LITE)
    assert (config.q_rank, config.kv_rank, config.nope_dim, config.value_dim) == (
        None,
        512,
        128,
        128,
    )
    assert config.sparse == (False,) + (True,) * 26
    assert config.experts == ExpertsConfig(64, 1408, Routing(top_k=6), shared_size=2816)
    assert config.cached_token == CachedToken(1, 1, 576)
    assert config.interleaved and config.rope.amplitude == 1.0
    assert config.max_position_embeddings == 163840
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("scale", [0.707, 1.0, 0.3, None])
def test_scores_have_hugging_faces_scale(tmp_path: Path, scale: float | None) -> None:
    rope = {**V2_LITE["rope_scaling"], "mscale_all_dim": scale}
    ours = _read(tmp_path, {**V2_LITE, "rope_scaling": rope})
    config = transformers.DeepseekV2Config(
        hidden_size=16,
        num_attention_heads=1,
        rope_parameters={**rope, "rope_type": "yarn", "rope_theta": 10000.0},
    )
    assert ours.score_scale == pytest.approx(DeepseekV2Attention(config, 0).scaling, rel=1e-12)


def test_routing_of_deepseek_v3_by_default(tmp_path: Path) -> None:
    config = _read(tmp_path, {"architectures": ["DeepseekV3ForCausalLM"]})
    assert config.experts.routing == Routing(
        top_k=8,
        scores="sigmoid",
        renormalise=True,
        scale=2.5,
        groups=8,
        top_groups=4,
        group_score="best two",
        corrected=True,
    )
    assert config.experts.count == 256
    assert config.sparse == (False,) * 3 + (True,) * 58


def test_memory_of_deepseek_v2_lite(tmp_path: Path) -> None:
    """15.7 billion parameters as published, of which routers are kept in float32."""
    config = _read(tmp_path, V2_LITE)
    routers = 26 * 64 * 2048
    assert weight_bytes(config, torch.bfloat16) == 31_412_968_448 + 2 * routers
    found = estimate(config, WorkerSettings(), 80 << 30)
    assert found.kv_bytes_per_token == 27 * 576 * 2
    layout = config.kv_layout(16, "bfloat16")
    assert allocate_pool(layout, 2, CPU).nbytes == 2 * layout.block_bytes == 2 * 16 * 27 * 576 * 2


REFUSED = {
    "odd-rotation": (V2_LITE | {"qk_rope_head_dim": 7}, "qk_rope_head_dim (7) is odd"),
    "no-rank": (V2_LITE | {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, not 0"),
    "no-number-of-experts": (
        {k: v for k, v in V2_LITE.items() if k != "num_experts_per_tok"},
        "num_experts_per_tok is missing",
    ),
    "biases": (V2_LITE | {"attention_bias": True}, "attention_bias is not supported where q_lora"),
    "sparse-by-step": (V2_LITE | {"moe_layer_freq": 2}, "moe_layer_freq is not 1"),
    "other-choice": (V2_LITE | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not"),
    "other-scores": (V2_LITE | {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not"),
    "renormalised": (V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
    "many-layers": (V2_LITE | {"num_hidden_layers": 10**9}, "must be at most 4096"),
    "window": (V2_LITE | {"layer_types": ["sliding_attention"]}, "layer_types has sliding"),
    "negative-scale": (
        V2_LITE | {"rope_scaling": {**V2_LITE["rope_scaling"], "mscale_all_dim": -1}},
        "mscale_all_dim must be a positive number",
    ),
    "groups-without-number": (
        {k: v for k, v in V2_LITE.items() if k != "n_group"}
        | {"topk_method": "group_limited_greedy"},
        "n_group is missing",
    ),
    "uneven-groups": (V3 | {"n_group": 7}, "n_group (7) must divide n_routed_experts (256)"),
    "more-groups-than-there-are": (V3 | {"topk_group": 9}, "topk_group (9) must not be more"),
    "groups-of-one": (
        V3 | {"n_group": 256, "topk_group": 16},
        "a group of 1 experts is too small",
    ),
    "too-few-in-groups": (
        V3 | {"n_group": 64, "topk_group": 1},
        "a group of 4 experts is too small: a token has 8 of 1 groups",
    ),
    "v3-with-softmax": (
        V3 | {"scoring_func": "softmax"},
        "scoring_func 'softmax' is not supported",
    ),
    "v3-greedy": (V3 | {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    "quantised": (
        V3 | {"quantization_config": {"quant_method": "gguf"}},
        "'gguf' is not supported",
    ),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError) as caught:
        load_config(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_that_predict_further_tokens_are_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path, "deepseekv3", "all-dense")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"model.layers.3.eh_proj.weight": torch.ones(3)}
    save_file(tensors, file, metadata={"format": "pt"})
    with caplog.at_level("INFO", "pagewire"):
        load_model(tmp_path, load_config(tmp_path), CPU, torch.float32, load_ops("torch", "cpu"))
    assert "does not use: 1 of model.layers.3.*" in caplog.text
