"""Quantised models divided among ranks, against Hugging Face's code on the plain checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.shared.base.errors import ModelLoadError
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.fp8_checkpoints import Layout, write_fp8
from pagewire.tests.support.int4_checkpoints import Int4Layout, write_int4
from pagewire.tests.support.mxfp4_checkpoints import write_mxfp4
from pagewire.tests.support.quantised_checkpoints import run
from pagewire.tests.support.thread_ranks import load_ranks
from pagewire.tests.support.tiny_models import VOCAB, set_gates, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # of the largest logit, in float32
CT, FP8 = "compressed-tensors", "fp8"
# All of what is quantised together is within a rank's part: heads are of 32, and inner sizes have
# five parts of 32.
SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 160}
LAYOUTS: dict[str, tuple[str, Layout | Int4Layout | None]] = {
    "fp8-blocks": ("qwen3", Layout(FP8, (32, 32))),
    "fp8-fused-blocks": ("phi3", Layout(CT, (32, 32))),
    "fp8-channels-biases": ("qwen2", Layout(CT, (1, None))),
    "fp8-tensors-static": ("llama", Layout(CT, (None, None), True)),
    "fp8-channels-head": ("llama", Layout(CT, (1, None), skipped="none")),
    "fp8-some-ignored": ("llama", Layout(FP8, (32, 32), skipped="lm_head|.*k_proj|.*up_proj")),
    "fp8-pairs-rotated": ("cohere", Layout(FP8, (32, 32))),
    "fp8-experts": ("qwen3moe", Layout(FP8, (32, 32))),
    "fp8-latents": ("deepseekv2", Layout(CT, (1, None))),
    "awq": ("llama", Int4Layout("awq", 16)),
    "gptq": ("qwen2", Int4Layout("gptq", 16, symmetric=True)),
    "gptq-v2-of-rows": ("phi3", Int4Layout("gptq_v2", None)),
    "packed": ("cohere", Int4Layout("packed", 32, symmetric=True)),
    "packed-asymmetric": ("qwen3", Int4Layout("packed", 16)),
    "awq-experts": ("qwen3moe", Int4Layout("awq", 16)),
    "gptq-experts": ("qwen3moe", Int4Layout("gptq", 16)),
    "packed-experts": (
        "deepseekv2",
        Int4Layout("packed", 8, symmetric=True, skipped="lm_head|.*self_attn.*"),
    ),
    "mxfp4-experts": ("gptoss", None),
}


def write(path: Path, family: str, layout: Layout | Int4Layout | None, **changes: Any) -> Any:
    """Write a checkpoint to `stored`; return Hugging Face's model that it stands for.

    Without a layout, its experts are in MXFP4.
    """
    changes = {**SIZES, **changes}
    if family == "qwen3moe":
        changes["moe_intermediate_size"] = 96
    if family == "llama":
        changes |= {"attention_bias": True, "mlp_bias": True}
    if family == "deepseekv2":
        del changes["head_dim"]
    plain = write_tiny_model(path / "plain", family, "groups-of-2-odd-vocabulary", **changes)
    paths = (path / "plain", path / "stored", path / "meant")
    if layout is None:
        write_mxfp4(*paths)
    else:
        write = write_fp8 if isinstance(layout, Layout) else write_int4
        write(*paths, layout)
    theirs = type(plain).from_pretrained(
        path / "meant", dtype=torch.float32, attn_implementation="eager"
    )
    set_gates(theirs.eval())
    return theirs


@pytest.mark.parametrize("name", LAYOUTS)
def test_float32_is_what_the_weights_stand_for(tmp_path: Path, name: str) -> None:
    theirs = write(tmp_path, *LAYOUTS[name])
    prompts = random_prompts((60, 60), VOCAB)
    with torch.inference_mode():
        expected = theirs(torch.tensor(prompts)).logits
    with load_ranks(tmp_path / "stored", 2) as ours:
        error = (run(ours, prompts) - expected).abs().max()
    assert error <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (Layout(FP8, (32, 32)), {"head_dim": 16}, "k_proj: a rank's part would begin or end"),
        (Layout(FP8, (32, 32)), {"intermediate_size": 32}, "at most 1 ranks can"),
        (Int4Layout("gptq", 16, ordered=True), {}, "o_proj: several ranks cannot share groups"),
    ],
)
def test_what_is_quantised_together_is_not_cut(
    tmp_path: Path, layout: Layout | Int4Layout, changes: dict[str, int], message: str
) -> None:
    write(tmp_path, "llama", layout, **changes)
    with pytest.raises(ModelLoadError, match=message), load_ranks(tmp_path / "stored", 2):
        pass


@pytest.mark.parametrize("family", ["llama", "qwen3moe", "gptoss"])
def test_quantised_while_loading(tmp_path: Path, family: str) -> None:
    """Each rank has its own scales for its parts of rows, which are as exact as one scale a row."""
    kind = type(write(tmp_path, family, None if family == "gptoss" else Layout(CT, (1, None))))
    plain, prompts = tmp_path / "plain", random_prompts((60, 60), VOCAB)
    theirs = kind.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    set_gates(theirs.eval())
    with torch.inference_mode():
        exact = theirs(torch.tensor(prompts)).logits
    errors = []
    for count in (1, 2):
        with load_ranks(plain, count, quantization="fp8") as ours:
            errors.append((run(ours, prompts) - exact).square().mean().sqrt())
    assert 0 < errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize("name", ["fp8-blocks", "packed", "mxfp4-experts"])
def test_random_weights(tmp_path: Path, name: str) -> None:
    write(tmp_path, *LAYOUTS[name])
    with load_ranks(tmp_path / "stored", 2, load_format="dummy") as ours:
        assert 0.01 < run(ours, random_prompts((20, 20), VOCAB)).std() < 10
