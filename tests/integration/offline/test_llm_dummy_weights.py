"""Weights that are made up: a mixture of experts is as busy with them as with trained ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire import LLM, SamplingParams
from pagewire.kernels.reference import route as reference

NUM_EXPERTS, TOP_K, LAYERS, TOKENS = 32, 4, 8, 512
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def test_a_prompt_is_spread_over_all_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    routings: list[torch.Tensor] = []
    route = reference.route

    def watched(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = route(*arguments)
        routings.append(chosen.clone())
        return chosen, weights

    monkeypatch.setattr(reference, "route", watched)
    llm = LLM(str(tmp_path), device="cpu", load_format="dummy", max_model_len=1024, num_blocks=80)
    routings.clear()
    prompt = torch.randint(2048, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    # On a busy machine, the prompt is computed in several steps.
    *whole, last = (torch.cat(routings[layer::LAYERS]) for layer in range(LAYERS))
    assert [each.shape for each in whole] == [(TOKENS, TOP_K)] * (LAYERS - 1)
    assert last.shape == (1, TOP_K)  # the token that samples
    for chosen in whole:
        tokens = chosen.flatten().bincount(minlength=NUM_EXPERTS)
        assert tokens.min() > 0
        assert tokens.max() < 3 * tokens.float().mean()
