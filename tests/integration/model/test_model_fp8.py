"""Checkpoints in FP8 against Hugging Face's code on the plain checkpoints that they stand for."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire import LLM, SamplingParams
from pagewire.kernels import load_ops
from pagewire.shared.model.config import load_config
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.quantization.config import FP8_WHILE_LOADING
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.fp8_checkpoints import Layout, with_quantised_inputs, write_fp8
from pagewire.tests.support.quantised_checkpoints import (
    CPU,
    WEIGHTS,
    check_greedy_tokens,
    load,
    run,
)
from pagewire.tests.support.tiny_models import VOCAB, set_gates, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # of the largest logit, in float32
CT, FP8 = "compressed-tensors", "fp8"
# Hidden size 48, inner size 80, heads of 12: blocks end raggedly, projections end inside blocks.
LAYOUTS = {
    "llama-channel": ("llama", "biases", Layout(CT, (1, None))),
    "llama-tensor-static": ("llama", "groups-of-2-odd-vocabulary", Layout(CT, (None, None), True)),
    "llama-weights-alone": ("llama", "own-head-size", Layout(CT, (1, None), inputs=False)),
    "llama-some-ignored": (
        "llama",
        "groups-of-2-odd-vocabulary",
        Layout(CT, (32, 32), skipped=r"lm_head|.*k_proj|.*0\.mlp\.up_proj|.*1\.mlp\..*"),
    ),
    "ministral-other-names": (
        "ministral",
        "windows-by-layer",
        Layout(FP8, (None, None), True, names=("weight_scale_inv", "activation_scale")),
    ),
    "qwen3-blocks": ("qwen3", "biases", Layout(FP8, (32, 32), scale_dtype=torch.bfloat16)),
    "qwen3-head-in-fp8": ("qwen3", "head-of-12-yarn", Layout(CT, (1, None), skipped="none")),
    "llama-modelopt": ("llama", "biases", Layout("modelopt", (None, None), True)),
    "phi3-fused-static": ("phi3", "groups-of-2-odd-vocabulary", Layout(FP8, (None, None), True)),
    "phi3-fused-blocks": ("phi3", "groups-of-2-odd-vocabulary", Layout(CT, (64, 32))),
    "gemma3-images": ("gemma3images", "groups-of-2-odd-vocabulary", Layout(FP8, (128, 128))),
    "cohere-channel": ("cohere", "biases", Layout(CT, (1, None))),
    "cohere-blocks": ("cohere", "groups-of-2-odd-vocabulary", Layout(FP8, (20, 32))),
    "cohere-some-ignored": ("cohere", "biases", Layout(FP8, (32, 32), skipped="lm_head|.*k_proj")),
    "granite-tensor": ("granitemoehybrid", "biases-not-rotated", Layout(FP8, (None, None))),
}
MIXTURES = {
    "qwen3moe-blocks": ("qwen3moe", "groups-of-2-odd-vocabulary", Layout(FP8, (32, 32))),
    "qwen2moe-channel": ("qwen2moe", "windows-in-lower-layers", Layout(CT, (1, None))),
    "mixtral-static": ("mixtral", "window", Layout(FP8, (None, None), True)),
    "deepseekv3-blocks": ("deepseekv3", "groups-of-2-odd-vocabulary", Layout(FP8, (32, 32))),
    "deepseekv2-channel": ("deepseekv2", "query-latents-biases", Layout(CT, (1, None))),
}
# As DeepSeek-V3 is published: no size of latent attention or of an expert is of whole blocks.
RAGGED = {
    "hidden_size": 320, "intermediate_size": 400, "moe_intermediate_size": 200,
    "q_lora_rank": 136, "kv_lora_rank": 144, "qk_nope_head_dim": 44, "qk_rope_head_dim": 24,
    "v_head_dim": 52,
}  # fmt: skip
LARGER = {
    "deepseekv3-128": Layout(FP8, (128, 128)),
    "deepseekv3-128-some-ignored": Layout(
        FP8,
        (128, 128),
        skipped=r"lm_head|.*kv_b_proj|.*1\.self_attn.*|.*q_a_proj|.*shared_experts.*",
    ),
    "deepseekv3-128-some-experts": Layout(FP8, (128, 128), skipped=r"lm_head|.*2\.mlp\.experts.*"),
}
EACH_LAYOUT = pytest.mark.parametrize("name", LAYOUTS)


def write(path: Path, name: str) -> tuple[Any, Layout, dict[str, torch.Tensor]]:
    """Write a checkpoint to `stored`; return the model that it stands for, and its layout."""
    sizes = RAGGED if name in LARGER else {}
    larger = {n: ("deepseekv3", "groups-of-2-odd-vocabulary", each) for n, each in LARGER.items()}
    family, shape, layout = {**LAYOUTS, **MIXTURES, **larger}[name]
    kind = type(write_tiny_model(path / "plain", family, shape, **sizes))
    scales = write_fp8(path / "plain", path / "stored", path / "meant", layout)
    theirs = kind.from_pretrained(path / "meant", dtype=torch.float32, attn_implementation="eager")
    set_gates(theirs.eval())
    return theirs, layout, scales


@torch.inference_mode()
def logits_of(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logits of Hugging Face's code: [prompts, T, vocab]."""
    logits: torch.Tensor = model(torch.tensor(prompts)).logits.float()
    return logits


@pytest.mark.parametrize("name", [*LAYOUTS, *MIXTURES, *LARGER])
def test_float32_is_what_the_weights_stand_for(tmp_path: Path, name: str) -> None:
    theirs, _, _ = write(tmp_path, name)
    model = load(tmp_path / "stored")
    in_fp8 = [each for each in model.stored() if each.dtype == torch.float8_e4m3fn]
    assert in_fp8
    prompts = random_prompts((60, 60), VOCAB)
    expected = logits_of(theirs, prompts)
    error = (run(model, prompts) - expected).abs().max()
    assert error <= TOLERANCE * expected.abs().max()


@EACH_LAYOUT
def test_bfloat16_multiplies_quantised_inputs(tmp_path: Path, name: str) -> None:
    """As exactly as Hugging Face's code in bfloat16 whose projections are replaced so."""
    theirs, layout, scales = write(tmp_path, name)
    prompts = random_prompts((60,) * 8, VOCAB)
    ours = run(load(tmp_path / "stored", torch.bfloat16), prompts)
    if layout.inputs:
        theirs = with_quantised_inputs(theirs.bfloat16().float(), layout, scales)
    exact = logits_of(theirs, prompts)
    coarse = copy.deepcopy(theirs).bfloat16()
    if layout.inputs:
        for one, other in zip(coarse.modules(), theirs.modules(), strict=True):
            if hasattr(one, "input_scale"):
                one.weight = other.weight
    errors, allowed = (
        (each - exact).square().mean(-1).sqrt() for each in (ours, logits_of(coarse, prompts))
    )
    assert errors.median() < 1.25 * allowed.median()
    assert errors.mean() < 1.5 * allowed.mean()


ONLINE = {
    "llama": ("llama", "biases"),
    "qwen3moe": ("qwen3moe", "groups-of-2-odd-vocabulary"),
    "deepseekv3": ("deepseekv3", "groups-of-2-odd-vocabulary"),
    "cohere": ("cohere", "biases"),
}
# Families whose experts are in one tensor, with the dimension of inputs.
STACKED = {"granitemoe": ("multipliers-of-1", 2), "gptoss": ("groups-of-2-odd-vocabulary", 1)}


@pytest.mark.parametrize(("family", "shape"), ONLINE.values(), ids=ONLINE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_while_loading_as_by_channels_before(
    tmp_path: Path, family: str, shape: str, dtype: torch.dtype
) -> None:
    """The matrices of latent attention, which are used as such, stay as they are."""
    write_tiny_model(tmp_path / "plain", family, shape).bfloat16().save_pretrained(
        tmp_path / "plain"
    )
    layout = Layout(CT, (1, None), skipped=r"lm_head|.*kv_b_proj")
    write_fp8(tmp_path / "plain", tmp_path / "stored", tmp_path / "meant", layout)
    config = load_config(tmp_path / "plain", quantization="fp8")
    ops, prompts = load_ops("torch", "cpu"), random_prompts((40, 40), VOCAB)
    ours = load_model(tmp_path / "plain", config, CPU, dtype, ops)
    stored = load(tmp_path / "stored", dtype)
    assert _numbers(ours) == _numbers(stored)
    assert torch.equal(run(ours, prompts), run(stored, prompts))


@pytest.mark.parametrize(("family", "shape", "of_inputs"), [(k, *v) for k, v in STACKED.items()])
def test_experts_in_one_tensor_are_quantised_while_loading(
    tmp_path: Path, family: str, shape: str, of_inputs: int
) -> None:
    kind = type(write_tiny_model(tmp_path, family, shape))
    layout = Layout(CT, (1, None), skipped=r"lm_head|.*router.*")
    config = load_config(tmp_path, quantization="fp8")
    ours = load_model(tmp_path, config, CPU, torch.float32, load_ops("torch", "cpu"))
    tensors = load_file(tmp_path / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.dim() == 3 or layout.quantises(name.removesuffix(".weight")):
            scale = tensor.abs().amax(of_inputs if tensor.dim() == 3 else 1, keepdim=True) / 448
            tensors[name] = (tensor / scale).clamp(-448, 448).to(
                torch.float8_e4m3fn
            ).float() * scale
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    theirs = kind.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    set_gates(theirs.eval())
    prompts = random_prompts((40, 40), VOCAB)
    expected = logits_of(theirs, prompts)
    assert (run(ours, prompts) - expected).abs().max() <= TOLERANCE * expected.abs().max()


def _numbers(model: DecoderModel) -> int:
    return sum(each.numel() for each in model.stored() if each.dtype == torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "name", ["llama-some-ignored", "qwen3-blocks", "qwen3moe-blocks", "deepseekv3-128"]
)
def test_greedy_tokens_of_the_engine(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    check_greedy_tokens(tmp_path)


def test_the_demo_model_answers_in_fp8() -> None:
    """Chunks and batches change nothing in batch-invariant mode."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "quantization": "fp8"}
    greedy = SamplingParams(temperature=0, max_tokens=12)
    prompts = ["To be, or not", "The city of", "def main():"]
    together = LLM(**settings, batch_invariant=True, max_num_batched_tokens=16)
    apart = LLM(**settings, batch_invariant=True)
    answers = [each.token_ids for each in together.generate(prompts, greedy)]
    assert answers == [apart.generate([prompt], greedy)[0].token_ids for prompt in prompts]


def test_a_layer_that_predicts_a_second_token_is_left_out(tmp_path: Path) -> None:
    """It is quantised, too, and config.json does not count it."""
    write(tmp_path, "deepseekv3-blocks")
    prompts = random_prompts((20, 20), VOCAB)
    before = run(load(tmp_path / "stored"), prompts)
    file = tmp_path / "stored" / WEIGHTS
    tensors = load_file(file)
    further = {
        name.replace("layers.2.", "layers.3."): each.clone()
        for name, each in tensors.items()
        if name.startswith("model.layers.2.")
    }
    assert any(name.endswith("weight_scale_inv") for name in further)
    save_file({**tensors, **further, "model.layers.3.eh_proj.weight": torch.ones(2, 4)}, file)
    assert torch.equal(run(load(tmp_path / "stored"), prompts), before)


def test_a_head_in_fp8_is_not_the_embedding(tmp_path: Path) -> None:
    """Whatever config.json says, which may be that of the plain model."""
    write(tmp_path, "qwen3-head-in-fp8")
    before = load(tmp_path / "stored")
    file = tmp_path / "stored" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    pairs = zip(load(tmp_path / "stored").stored(), before.stored(), strict=True)
    assert all(torch.equal(one.float(), other.float()) for one, other in pairs)


def test_dummy_weights_are_alike_in_size(tmp_path: Path) -> None:
    """Whatever is done to them after loading, their products are neither zero nor infinite."""
    write(tmp_path, "deepseekv3-blocks")
    (tmp_path / "stored" / "model.safetensors").unlink()
    config, ops = load_config(tmp_path / "stored"), load_ops("torch", "cpu")
    for quantization in (config.quantization, FP8_WHILE_LOADING, None):
        model = load_model(
            None, replace(config, quantization=quantization), CPU, torch.bfloat16, ops, "dummy"
        )
        logits = run(model, random_prompts((20, 20), VOCAB))
        assert 0.01 < logits.std() < 10
