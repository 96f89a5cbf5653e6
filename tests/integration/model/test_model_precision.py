"""Norms or routers in float32, windows, experts: bfloat16 logits, the engine's greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire import LLM, SamplingParams
from pagewire.kernels import load_ops
from pagewire.shared.model.config import load_config
from pagewire.shared.model.loader import load_model
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.tiny_models import VOCAB, set_gates, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {
    "cohere": "biases",
    "cohere2": "windows-by-layer",
    "gemma2": "windows-by-layer",
    "gemma3": "linear",
    "gemma3images": "groups-of-2-odd-vocabulary",
    "granitemoe": "multipliers-of-1",
    "granitemoehybrid": "biases-not-rotated",
    "mixtral": "window",
    "olmo2": "groups-of-2-odd-vocabulary",
    "olmo3": "yarn",
    "gptoss": "groups-of-2-odd-vocabulary",
    "qwen2moe": "windows-in-lower-layers",
    "deepseekv2": "query-latents-biases",
    "deepseekv3": "groups-of-2-odd-vocabulary",
}
EACH_FAMILY = pytest.mark.parametrize(("family", "shape"), SHAPES.items(), ids=SHAPES)
EACH_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@torch.inference_mode()
def _theirs(kind: Any, path: Path, prompts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Logits of Hugging Face's code with weights that bfloat16 has rounded: [prompts, T, vocab]."""
    model = kind.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    set_gates(model.eval().to(dtype))
    logits: torch.Tensor = model(torch.tensor(prompts)).logits.float()
    return logits


@EACH_DEVICE
@EACH_FAMILY
def test_bfloat16_is_as_exact_as_hugging_faces(
    tmp_path: Path, family: str, shape: str, device: str
) -> None:
    """Over many tokens: rounding gives a few of them other experts, and these much larger errors.

    Which ones is chance, in Hugging Face's code as in ours, so that the median is compared closely
    and the mean, which any wrong token raises, loosely.
    """
    changes = {"hidden_size": 64} if device == "cuda" else {}  # what kernels take
    if device == "cuda" and not family.startswith("deepseek"):
        changes["head_dim"] = 16
    kind = type(write_tiny_model(tmp_path, family, shape, **changes))
    ops, config = load_ops("auto", device), load_config(tmp_path)
    model = load_model(tmp_path, config, torch.device(device), torch.bfloat16, ops)
    paged = PagedModel(model, num_blocks=128, block_size=8, seed=3)
    prompts = random_prompts((120,) * 8, VOCAB)
    sequences = [paged.add(prompt) for prompt in prompts]
    paged.run_mixed(sequences, max_chunk=23)
    ours = torch.stack([torch.stack(sequence.logits) for sequence in sequences]).float().cpu()
    exact = _theirs(kind, tmp_path, prompts, torch.float32)
    coarse = _theirs(kind, tmp_path, prompts, torch.bfloat16)
    errors, allowed = ((each - exact).square().mean(-1).sqrt() for each in (ours, coarse))
    assert errors.median() < 1.15 * allowed.median()
    assert errors.mean() < 1.5 * allowed.mean()


@EACH_FAMILY
def test_greedy_tokens_of_the_engine(tmp_path: Path, family: str, shape: str) -> None:
    """Windows are shorter than the prompts, whose first blocks are given back meanwhile."""
    theirs = write_tiny_model(tmp_path, family, shape)
    llm = LLM(
        str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=48, block_size=16
    )
    prompts = random_prompts((1, 50, 100, 120), VOCAB)
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*prompt, *output.token_ids]])).logits[0]
        best = logits[len(prompt) - 1 : -1].topk(2, dim=-1)
        differs = best.indices[:, 0] != torch.tensor(output.token_ids)
        is_clear = best.values[:, 0] - best.values[:, 1] > 2e-4 * logits.abs().max()
        assert is_clear.float().mean() > 0.8
        assert not (differs & is_clear).any()
    assert llm.block_counts().used == 0
