"""gpt-oss as it is published, with experts in MXFP4, against Hugging Face's code.

The truth is the plain checkpoint of what MXFP4 stands for, as Hugging Face's code makes it, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagewire import LLM, SamplingParams
from pagewire.kernels import load_ops
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config, model_fingerprint
from pagewire.shared.model.loader import load_model
from pagewire.shared.worker.estimate import weight_bytes
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import is_greedy
from pagewire.tests.support.mxfp4_checkpoints import EXPERTS, SIZES, write_mxfp4
from pagewire.tests.support.quantised_checkpoints import (
    CPU,
    WEIGHTS,
    load,
    run,
)
from pagewire.tests.support.tiny_models import VOCAB, set_gates, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # of the largest logit, in float32
SHAPES = ("groups-of-2-odd-vocabulary", "without-biases-own-gate", "windows-by-layer")
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)


def write(path: Path, shape: str = SHAPES[0], **changes: Any) -> Any:
    """Write a checkpoint to `stored`; return Hugging Face's model that it stands for."""
    write_tiny_model(path / "plain", "gptoss", shape, **{**SIZES, **changes})
    write_mxfp4(path / "plain", path / "stored", path / "meant")
    theirs = GptOssForCausalLM.from_pretrained(
        path / "meant", dtype=torch.float32, attn_implementation="eager"
    )
    set_gates(theirs.eval())
    return theirs


@EACH_SHAPE
def test_float32_is_what_the_weights_stand_for(tmp_path: Path, shape: str) -> None:
    theirs = write(tmp_path, shape)
    prompts = random_prompts((60, 60), VOCAB)
    with torch.inference_mode():
        expected = theirs(torch.tensor(prompts)).logits
    error = (run(load(tmp_path / "stored"), prompts) - expected).abs().max()
    assert error <= TOLERANCE * expected.abs().max()


def test_the_files_mean_to_hugging_face_what_they_mean_here(tmp_path: Path) -> None:
    write(tmp_path)
    stored, meant = (load_file(tmp_path / name / WEIGHTS) for name in ("stored", "meant"))
    names = [name for name in meant if name.endswith(EXPERTS)]
    assert len(names) == 6
    for name in names:
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(theirs, meant[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_for_bit_as_the_plain_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path)
    prompts = random_prompts((60, 60), VOCAB)
    stored, plain = (run(load(tmp_path / name, dtype), prompts) for name in ("stored", "meant"))
    assert torch.equal(stored, plain)


@EACH_SHAPE
def test_sixty_four_greedy_tokens_are_hugging_faces(tmp_path: Path, shape: str) -> None:
    theirs = write(tmp_path, shape)
    prompts = random_prompts((5, 40), VOCAB)
    llm = LLM(str(tmp_path / "stored"), device="cpu", dtype="float32", max_num_batched_tokens=16)
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for prompt, answer in zip(prompts, llm.generate(prompts, greedy), strict=True):
        assert is_greedy(theirs, prompt, list(answer.token_ids))


def test_chunks_and_batches_change_nothing_in_batch_invariant_mode(tmp_path: Path) -> None:
    write(tmp_path)
    prompts = random_prompts((1, 30), VOCAB)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "batch_invariant": True}
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True, logprobs=0)
    together = LLM(str(tmp_path / "stored"), **settings, max_num_batched_tokens=16)
    apart = LLM(str(tmp_path / "stored"), **settings)
    answers = together.generate(prompts, sampled)
    for prompt, answer in zip(prompts, answers, strict=True):
        (alone,) = apart.generate([prompt], sampled)
        assert answer.outputs[0].logprobs == alone.outputs[0].logprobs


def test_weights_stay_in_four_bits(tmp_path: Path) -> None:
    """17 bytes for 32 weights; `estimate` knows it."""
    write(tmp_path)
    model = load(tmp_path / "stored", torch.bfloat16)
    plain = load(tmp_path / "meant", torch.bfloat16)
    stored, unquantised = (sum(each.nbytes for each in m.stored()) for m in (model, plain))
    weights = 3 * 5 * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert unquantised - stored == weights * 2 - weights * 17 // 32
    assert weight_bytes(load_config(tmp_path / "stored"), torch.bfloat16) == stored


def test_dummy_weights_are_of_a_usual_size(tmp_path: Path) -> None:
    write(tmp_path)
    config, ops = load_config(tmp_path / "stored"), load_ops("torch", "cpu")
    model = load_model(None, config, CPU, torch.bfloat16, ops, "dummy")
    assert any(each.dtype == torch.uint8 for each in model.stored())
    assert 0.01 < run(model, random_prompts((20, 20), VOCAB)).std() < 10


def test_a_copy_that_is_not_quantised_is_served_whatever_config_json_says(tmp_path: Path) -> None:
    """Its tensors decide, as those of a checkpoint that was converted to bfloat16."""
    write(tmp_path)
    before = load(tmp_path / "meant")
    config = (tmp_path / "stored" / "config.json").read_text()
    (tmp_path / "meant" / "config.json").write_text(config)
    prompts = random_prompts((20, 20), VOCAB)
    assert torch.equal(run(load(tmp_path / "meant"), prompts), run(before, prompts))


def test_fingerprints_are_those_of_the_files(tmp_path: Path) -> None:
    write(tmp_path)
    stored, meant = (
        model_fingerprint(tmp_path / name, load_config(tmp_path / name))
        for name in ("stored", "meant")
    )
    assert stored != meant
    file = tmp_path / "stored" / WEIGHTS
    tensors = load_file(file)
    tensors[next(name for name in tensors if name.endswith("_scales"))][-1, -1, -1] += 1
    save_file(tensors, file)
    assert model_fingerprint(file.parent, load_config(file.parent)) != stored


def test_sizes_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "stored" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 80}))
    with pytest.raises(ModelLoadError, match=r"multiples of 32 \(they have 64 and 80\)"):
        load(tmp_path / "stored")


def test_mixtures_with_a_tensor_for_each_expert_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3moe", "groups-of-2-odd-vocabulary")
    file = tmp_path / "config.json"
    fields = {**json.loads(file.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match="experts in MXFP4 are supported only in one tensor"):
        weight_bytes(load_config(tmp_path), torch.bfloat16)


def test_other_tensors_in_mxfp4_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "stored" / WEIGHTS
    tensors = load_file(file)
    blocks = torch.zeros(64, 2, 16, dtype=torch.uint8)
    save_file({**tensors, "model.layers.0.self_attn.o_proj_blocks": blocks}, file)
    with pytest.raises(ModelLoadError, match=r"0\.self_attn\.o_proj: only experts may be in MXFP4"):
        load(tmp_path / "stored")
