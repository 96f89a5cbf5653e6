"""Checkpoints in INT4 against Hugging Face's code on the plain checkpoints that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.kernels import load_ops
from pagewire.kernels.reference import four_bits
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.loader import load_model
from pagewire.shared.worker.estimate import weight_bytes
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.int4_checkpoints import Int4Layout, write_int4
from pagewire.tests.support.quantised_checkpoints import (
    CPU,
    WEIGHTS,
    check_greedy_tokens,
    load,
    run,
)
from pagewire.tests.support.tiny_models import VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # of the largest logit, in float32
# Hidden size 48, inner size 80: the last group of 32 inputs has 16.
LAYOUTS = {
    "llama-awq": ("llama", "biases", Int4Layout("awq", 16)),
    "qwen3-awq-some-ignored": (
        "qwen3",
        "biases",
        Int4Layout("awq", 8, skipped=r"lm_head|.*k_proj|.*0\.mlp.*"),
    ),
    "llama-gptq": ("llama", "biases", Int4Layout("gptq", 16, symmetric=True)),
    "llama-gptq-ordered": (
        "llama", "groups-of-4-tied-odd-vocabulary", Int4Layout("gptq", 16, ordered=True)
    ),
    "qwen3-gptq-v2-ordered": ("qwen3", "biases", Int4Layout("gptq_v2", 32, ordered=True)),
    "phi3-gptq-of-rows": ("phi3", "groups-of-2-odd-vocabulary", Int4Layout("gptq", None)),
    "cohere-packed": ("cohere", "biases", Int4Layout("packed", 32, symmetric=True)),
    "gemma3-packed-asymmetric": ("gemma3", "biases-and-cap", Int4Layout("packed", 16)),
    "llama-packed-ordered": ("llama", "biases", Int4Layout("packed", 8, ordered=True)),
    "llama-gptq-head": ("llama", "own-head-size", Int4Layout("gptq", 16, skipped="none")),
    "llama-packed-of-rows": ("llama", "own-head-size", Int4Layout("packed", None, symmetric=True)),
    "deepseekv3-dense-packed": (
        "deepseekv3",
        "groups-of-2-odd-vocabulary",
        Int4Layout("packed", 8, symmetric=True, skipped=r"lm_head|.*experts.*"),
    ),
}  # fmt: skip
MIXTURES = {
    "qwen3moe-awq": ("qwen3moe", "groups-of-2-odd-vocabulary", Int4Layout("awq", 16)),
    "qwen3moe-gptq": ("qwen3moe", "every-second-yarn", Int4Layout("gptq", 16, symmetric=True)),
    "qwen3moe-gptq-ordered": (
        "qwen3moe", "groups-of-2-odd-vocabulary", Int4Layout("gptq", 16, ordered=True)
    ),
    "deepseekv2-gptq-v2-ordered": (
        "deepseekv2", "lite-yarn", Int4Layout("gptq_v2", 32, ordered=True)
    ),
    "deepseekv3-packed": ("deepseekv3", "groups-of-2-odd-vocabulary", Int4Layout("packed", 32)),
    "mixtral-packed-ordered": (
        "mixtral", "window", Int4Layout("packed", 8, symmetric=True, ordered=True)
    ),
    "qwen2moe-packed-of-rows": (
        "qwen2moe", "some-dense-layers", Int4Layout("packed", None, skipped="lm_head|.*gate")
    ),
    "deepseekv2-awq-some-layers": (
        "deepseekv2", "groups-of-experts", Int4Layout("awq", 8, skipped=r"lm_head|.*layers\.1\..*")
    ),
}  # fmt: skip
EACH_LAYOUT = pytest.mark.parametrize("name", [*LAYOUTS, *MIXTURES])


def write(path: Path, name: str) -> Any:
    """Write a checkpoint to `stored`; return Hugging Face's model that it stands for."""
    family, shape, layout = {**LAYOUTS, **MIXTURES}[name]
    sizes = {"moe_intermediate_size": 40} if family == "qwen3moe" else {}  # AWQ packs 8 outputs
    kind = type(write_tiny_model(path / "plain", family, shape, **sizes))
    write_int4(path / "plain", path / "stored", path / "meant", layout)
    return kind.from_pretrained(
        path / "meant", dtype=torch.float32, attn_implementation="eager"
    ).eval()


@EACH_LAYOUT
def test_float32_is_what_the_weights_stand_for(tmp_path: Path, name: str) -> None:
    theirs = write(tmp_path, name)
    model = load(tmp_path / "stored")
    assert any(each.dtype == torch.uint8 for each in model.stored())
    prompts = random_prompts((60, 60), VOCAB)
    with torch.inference_mode():
        expected = theirs(torch.tensor(prompts)).logits
    error = (run(model, prompts) - expected).abs().max()
    assert error <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    "name",
    ["llama-awq", "llama-gptq-ordered", "cohere-packed", "qwen3moe-awq", "mixtral-packed-ordered"],
)
def test_bfloat16_rounds_what_the_weights_stand_for(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit as the plain checkpoint; where inputs have another order, up to rounding."""
    monkeypatch.setattr(four_bits, "DEQUANTISED_AT_A_TIME", 500)  # of which products have several
    write(tmp_path, name)
    prompts = random_prompts((60, 60), VOCAB)
    ours, plain = (run(load(tmp_path / n, torch.bfloat16), prompts) for n in ("stored", "meant"))
    if "ordered" in name:
        assert (ours - plain).abs().max() <= 0.05 * plain.abs().max()
    else:
        assert torch.equal(ours, plain)


@EACH_LAYOUT
def test_estimated_bytes_are_those_of_the_loaded_model(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    config = load_config(tmp_path / "stored")
    model = load(tmp_path / "stored", torch.bfloat16)
    assert weight_bytes(config, torch.bfloat16) == sum(each.nbytes for each in model.stored())


@pytest.mark.parametrize(
    "name", ["qwen3-awq-some-ignored", "qwen3-gptq-v2-ordered", "qwen3moe-gptq-ordered"]
)
def test_greedy_tokens_of_the_engine(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    check_greedy_tokens(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-awq-some-ignored",
        "llama-gptq-ordered",
        "gemma3-packed-asymmetric",
        "llama-gptq-head",
        "qwen3moe-gptq-ordered",
        "deepseekv3-packed",
    ],
)
def test_dummy_weights_are_of_a_usual_size(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    config, ops = load_config(tmp_path / "stored"), load_ops("torch", "cpu")
    model = load_model(None, config, CPU, torch.bfloat16, ops, "dummy")
    assert any(each.dtype == torch.uint8 for each in model.stored())
    assert 0.01 < run(model, random_prompts((20, 20), VOCAB)).std() < 10


def edit(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace or add tensors of the checkpoint in `stored`."""
    file = path / "stored" / WEIGHTS
    save_file({**load_file(file), **tensors}, file)


def same_weights(one: DecoderModel, other: DecoderModel) -> bool:
    pairs = zip(one.stored(), other.stored(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_biases_of_zeros_that_a_writer_adds_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AutoGPTQ gives each projection a bias; one that is not zero belongs to another model."""
    write(tmp_path, "llama-gptq-head")
    before = load(tmp_path / "stored")
    tensors = load_file(tmp_path / "stored" / WEIGHTS)
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    edit(tmp_path, {f"{name}.bias": torch.zeros(8, dtype=torch.float16) for name in names})
    with caplog.at_level("INFO", "pagewire"):
        assert same_weights(load(tmp_path / "stored"), before)
    assert f"{len(names)} of *.bias" in caplog.text
    edit(tmp_path, {f"{names[0]}.bias": torch.tensor([0.0, 1.0])})
    with pytest.raises(ModelLoadError, match=rf"1 tensor is not in the model \({names[0]}\.bias"):
        load(tmp_path / "stored")


def test_a_quantised_head_is_not_the_embedding(tmp_path: Path) -> None:
    """Whatever config.json says, which may be that of the plain model."""
    write(tmp_path, "llama-gptq-head")
    before = load(tmp_path / "stored")
    file = tmp_path / "stored" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    assert same_weights(load(tmp_path / "stored"), before)


def test_groups_of_zeros_say_nothing_where_inputs_are_in_order(tmp_path: Path) -> None:
    write(tmp_path, "llama-gptq")
    before = load(tmp_path / "stored")
    tensors = load_file(tmp_path / "stored" / WEIGHTS)
    zeros = {n: torch.zeros_like(each) for n, each in tensors.items() if n.endswith(".g_idx")}
    edit(tmp_path, zeros)
    assert same_weights(load(tmp_path / "stored"), before)


def test_groups_of_minus_one_say_that_inputs_are_in_order(tmp_path: Path) -> None:
    """So compressed-tensors marks projections that it did not put in order."""
    write(tmp_path, "cohere-packed")
    before = load(tmp_path / "stored")
    file = tmp_path / "stored" / "config.json"
    file.write_text(file.read_text().replace('"actorder": null', '"actorder": "group"'))
    tensors = load_file(tmp_path / "stored" / WEIGHTS)
    shapes = {n: each for n, each in tensors.items() if n.endswith("weight_shape")}
    edit(
        tmp_path,
        {
            name.replace("weight_shape", "weight_g_idx"): torch.full((int(shape[1]),), -1).int()
            for name, shape in shapes.items()
        },
    )
    prompts = random_prompts((20,), VOCAB)
    assert torch.equal(run(load(tmp_path / "stored"), prompts), run(before, prompts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama-awq", "llama-gptq", "cohere-packed"])
def test_scales_of_any_dtype_are_taken(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    write(tmp_path, name)
    tensors = load_file(tmp_path / "stored" / WEIGHTS)
    rounded = {n: x.to(dtype) for n, x in tensors.items() if n.endswith(("scales", "weight_scale"))}
    edit(tmp_path, {n: each.float() for n, each in rounded.items()})
    before = load(tmp_path / "stored")
    edit(tmp_path, rounded)
    assert same_weights(load(tmp_path / "stored"), before)


def test_older_descriptions_have_files_of_their_own(tmp_path: Path) -> None:
    """And AWQ's has other names for bits and groups."""
    for name, file, described in (
        ("llama-awq", "quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}),
        ("llama-gptq", "quantize_config.json", {"bits": 4, "group_size": 16, "sym": True}),
    ):
        write(tmp_path / name, name)
        before, stored = load(tmp_path / name / "stored"), tmp_path / name / "stored"
        fields = json.loads((stored / "config.json").read_text())
        fields.pop("quantization_config")
        (stored / "config.json").write_text(json.dumps(fields))
        (stored / file).write_text(json.dumps(described))
        assert same_weights(load(stored), before)


def test_an_index_may_leave_out_tensors_of_its_files(tmp_path: Path) -> None:
    """The files' own headers count; a tensor that no file has is named."""
    write(tmp_path, "cohere-packed")
    before, stored = load(tmp_path / "stored"), tmp_path / "stored"
    tensors = load_file(stored / WEIGHTS)
    (stored / WEIGHTS).unlink()
    scales = {name: each for name, each in tensors.items() if name.endswith("weight_scale")}
    others = {name: each for name, each in tensors.items() if name not in scales}
    save_file(scales, stored / "model-00001-of-00002.safetensors")
    save_file(others, stored / "model-00002-of-00002.safetensors")
    listed = dict(zip(others, ["model-00002-of-00002.safetensors"] * len(others), strict=True))
    first = {next(iter(scales)): "model-00001-of-00002.safetensors"}
    index = stored / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed | first}))
    assert same_weights(load(stored), before)
    index.write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(ModelLoadError, match=rf"{len(scales)} tensors are missing \(model\.layers"):
        load(stored)


@pytest.mark.parametrize("part", ["qweight", "weight_packed"])
def test_quantised_embeddings_are_refused(tmp_path: Path, part: str) -> None:
    write(tmp_path, "llama-gptq" if part == "qweight" else "cohere-packed")
    edit(tmp_path, {f"model.embed_tokens.{part}": torch.zeros(VOCAB, 6, dtype=torch.int32)})
    with pytest.raises(ModelLoadError, match=r"^model\.embed_tokens is quantised, which is not"):
        load(tmp_path / "stored")


def test_inputs_that_are_in_order_are_not_gathered(tmp_path: Path) -> None:
    """Though config.json says that they may have any order."""
    write(tmp_path, "llama-gptq")
    file = tmp_path / "stored" / "config.json"
    file.write_text(file.read_text().replace('"desc_act": false', '"desc_act": true'))
    assert load_config(tmp_path / "stored").quantization.groups[0].format.ordered
    assert all(each.dtype != torch.int64 for each in load(tmp_path / "stored").stored())


def test_groups_that_are_not_those_of_the_configuration_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama-gptq")
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors = load_file(tmp_path / "stored" / WEIGHTS)
    edit(tmp_path, {name: tensors[name].flip(0).contiguous()})
    with pytest.raises(ModelLoadError, match="up_proj: its g_idx does not put 16 inputs into each"):
        load(tmp_path / "stored")


def test_experts_whose_inputs_are_in_order_have_no_order(tmp_path: Path) -> None:
    """Though config.json says that they may have any."""
    write(tmp_path, "qwen3moe-gptq")
    file = tmp_path / "stored" / "config.json"
    before = load(tmp_path / "stored")
    file.write_text(file.read_text().replace('"desc_act": false', '"desc_act": true'))
    after = load(tmp_path / "stored")
    first, second = ([x for x in m.stored() if x.dim() == 3] for m in (before, after))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_an_expert_in_other_groups_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "qwen3moe-gptq")
    name = "model.layers.1.mlp.experts.3.up_proj.g_idx"
    tensors = load_file(tmp_path / "stored" / WEIGHTS)
    edit(tmp_path, {name: tensors[name].flip(0).contiguous()})
    with pytest.raises(ModelLoadError, match=r"experts\.3\.up_proj: its g_idx does not put 16 "):
        load(tmp_path / "stored")


def test_experts_of_one_layer_in_different_formats_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "plain", "deepseekv2", "lite-yarn")
    layout = Int4Layout("gptq", 16, skipped=r"lm_head|.*experts\.2\.up_proj")
    write_int4(tmp_path / "plain", tmp_path / "s", tmp_path / "m", layout)
    with pytest.raises(ModelLoadError, match=r"experts\.2\.up_proj have different formats"):
        load(tmp_path / "s")


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "granitemoe", "multipliers-of-1")
    file = tmp_path / "config.json"
    described = {"quant_method": "awq", "bits": 4, "group_size": 16}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": described}))
    with pytest.raises(ModelLoadError, match="experts in INT4 must have one tensor each"):
        weight_bytes(load_config(tmp_path), torch.bfloat16)
