"""KV caches in FP8 against Hugging Face's code with keys and values that are rounded so.

What is cached of a token depends on the token alone, and attention reads only the cache. So chunks,
preemption and cached prefixes change no token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import ConfigError, ModelLoadError
from pagewire.shared.kv.model_identity import first_difference
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import is_greedy
from pagewire.tests.support.quantised_checkpoints import WEIGHTS
from pagewire.tests.support.rounded_caches import rounded_caches
from pagewire.tests.support.tiny_models import VOCAB, write_tiny_model
from pagewire.tools.demo_model.prompts import standard_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
LONGEST = 160
FAMILIES = {
    "llama": ("llama", "groups-of-2-odd-vocabulary"),
    "qwen3": ("qwen3", "groups-of-2-odd-vocabulary"),
    "gemma3-windows": ("gemma3", "default-pattern"),
    "gpt-oss-sinks": ("gptoss", "groups-of-2-odd-vocabulary"),
}
WAYS: dict[str, dict[str, Any]] = {
    "chunks-of-32": {"max_num_batched_tokens": 32},
    "one-by-one-uncached": {"max_num_seqs": 1, "enable_prefix_caching": False},
}


def make(model: str | Path, **settings: Any) -> LLM:
    return LLM(model, device="cpu", dtype="float32", kv_cache_dtype="fp8", **settings)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    found = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    llm.core.scheduler.table.check_integrity()
    assert llm.block_counts().used == 0
    return found


def tiny_prompts() -> list[list[int]]:
    prompts = random_prompts((1, 30, 70, 70, 120), VOCAB)
    return [*prompts, prompts[2], prompts[4][:100] + prompts[1]]


@pytest.mark.parametrize(("family", "shape"), FAMILIES.values(), ids=FAMILIES)
def test_tokens_are_those_of_rounded_keys_and_values(
    tmp_path: Path, family: str, shape: str
) -> None:
    theirs = write_tiny_model(tmp_path, family, shape)
    theirs.set_attn_implementation("eager")
    prompts = tiny_prompts()
    llm = make(tmp_path)
    whole = answers(llm, prompts)
    with rounded_caches(theirs):
        for prompt, answer in zip(prompts, whole, strict=True):
            assert is_greedy(theirs, prompt, answer)
    of_one = llm.engine.layout.most_blocks(LONGEST, 32)
    preempted = {"max_num_batched_tokens": 32, "num_blocks": of_one + 4}
    for way, settings in {**WAYS, "preempted": preempted}.items():
        assert answers(make(tmp_path, **settings), prompts) == whole, way


def test_the_demo_model_answers_as_in_one_pass() -> None:
    llm = make("demo")
    assert llm.tokenizer is not None
    prompts = standard_prompts(llm.tokenizer)[:12]
    whole = answers(llm, prompts)
    assert answers(llm, prompts) == whole  # from cached blocks
    for settings in ({"max_num_batched_tokens": 32}, {"num_blocks": 98}):
        assert answers(make("demo", **settings), prompts) == whole, settings
    theirs = AutoModelForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.float32, attn_implementation="eager"
    )
    with rounded_caches(theirs):
        for prompt, answer in zip(prompts, whole, strict=True):
            assert is_greedy(theirs, prompt, answer)


SCALE_NAMES = {
    "compressed-tensors": ("{}.k_scale", "{}.v_scale"),
    "modelopt": ("{}.k_proj.k_scale", "{}.v_proj.v_scale"),
    "of-outputs": ("{}.k_proj.output_scale", "{}.v_proj.output_scale"),
}


def edit(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(load_file(path / WEIGHTS) | tensors, path / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("names", SCALE_NAMES.values(), ids=SCALE_NAMES)
def test_scales_of_the_checkpoint_are_used(
    tmp_path: Path, names: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    theirs = write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    theirs.set_attn_implementation("eager")
    prompts = tiny_prompts()
    scales = [(0.003, 2.0), (0.017, 0.25), (0.0071, 0.001)]
    tensors = {
        name.format(f"model.layers.{layer}.self_attn"): torch.tensor(scale).bfloat16()[None]
        for layer, of_layer in enumerate(scales)
        for name, scale in zip(names, of_layer, strict=True)
    }
    edit(tmp_path, tensors)
    rounded = [(torch.tensor(each).bfloat16().tolist()) for each in scales]
    with caplog.at_level("INFO", "pagewire"):
        found = answers(make(tmp_path, max_num_batched_tokens=32), prompts)
    assert "6 of the 6 scales of the FP8 KV cache are the checkpoint's" in caplog.text
    assert "does not use" not in caplog.text
    with rounded_caches(theirs, rounded):
        for prompt, answer in zip(prompts, found, strict=True):
            assert is_greedy(theirs, prompt, answer)


def test_missing_scales_are_1_and_unused_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path, "phi3", "groups-of-2-odd-vocabulary")
    edit(
        tmp_path,
        {
            "model.layers.0.self_attn.qkv_proj.output_scale": torch.ones(1),
            "model.layers.1.self_attn.kv_scale": torch.full((), 0.5),
        },
    )
    with caplog.at_level("INFO", "pagewire"):
        model = make(tmp_path).engine.runner.model
    assert isinstance(model, DecoderModel)
    scales = model.config.kv_scales
    assert scales == ((1.0, 1.0), (0.5, 0.5), (1.0, 1.0))
    assert "2 of the 6 scales of the FP8 KV cache are the checkpoint's" in caplog.text
    assert "does not use: 1 of *.output_scale" in caplog.text


def test_scales_alone_do_not_switch_it_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    edit(tmp_path, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    with caplog.at_level("INFO", "pagewire"):
        layout = LLM(tmp_path, device="cpu", dtype="float32").engine.layout
    assert layout.dtype == "float32"
    assert "which --kv-cache-dtype fp8 uses" in caplog.text


WRONG_SCALES = {
    "of-each-head": (torch.ones(2), r"k_scale is F32 \[2\]: a KV cache in FP8 has one scale"),
    "of-zero": (torch.zeros(1), "k_scale is 0, and a scale must be at least 1e-30"),
    "of-next-to-zero": (torch.tensor([1e-40]), r"k_scale is 9.999\d*e-41, and a scale must"),
    "of-nan": (torch.full((1,), torch.nan), "k_scale is nan, and a scale must be at least 1e-30"),
}


@pytest.mark.parametrize(("scale", "message"), WRONG_SCALES.values(), ids=WRONG_SCALES)
def test_wrong_scales_are_refused(tmp_path: Path, scale: torch.Tensor, message: str) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    edit(tmp_path, {"model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(ModelLoadError, match=message):
        make(tmp_path)


TWICE = {
    "kv": ("model.layers.1.self_attn.kv_scale", "model.layers.1.self_attn.k_scale"),
    "projection": ("model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.k_scale"),
}


@pytest.mark.parametrize("names", TWICE.values(), ids=TWICE)
def test_a_scale_may_be_there_twice_only_with_one_value(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    edit(tmp_path, {name: torch.tensor(0.5) for name in names})
    model = make(tmp_path).engine.runner.model
    assert isinstance(model, DecoderModel)
    assert model.config.kv_scales[1].keys == 0.5
    edit(tmp_path, {names[0]: torch.tensor(0.25)})
    with pytest.raises(ModelLoadError) as caught:
        make(tmp_path)
    text = str(caught.value)
    assert f"{names[0]} is 0.25" in text
    assert f"{names[1]} is 0.5" in text


@pytest.mark.parametrize("name", ["k_zero_point", "v_proj.v_zero_point"])
def test_zero_points_are_refused(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    edit(tmp_path, {f"model.layers.1.self_attn.{name}": torch.zeros(1)})
    with pytest.raises(ModelLoadError, match=f"{name}: zero points of a KV cache are not"):
        make(tmp_path)


OTHER_SCALES: dict[str, tuple[str, dict[str, Any], str]] = {
    "int8": (
        "config.json",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {},
                "kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"},
            }
        },
        "config.json: kv_cache_scheme has 8 bits of type 'int': --kv-cache-dtype fp8",
    ),
    "nvfp4": (
        "hf_quant_config.json",
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}},
        "hf_quant_config.json: kv_cache_quant_algo is 'NVFP4': --kv-cache-dtype fp8",
    ),
    "nvfp4-flat": (
        "hf_quant_config.json",
        {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"},
        "hf_quant_config.json: kv_cache_quant_algo is 'NVFP4': --kv-cache-dtype fp8",
    ),
    "nvfp4-nested": (
        "config.json",
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"},
            }
        },
        "config.json: kv_cache_quant_algo is 'NVFP4': --kv-cache-dtype fp8",
    ),
}


@pytest.mark.parametrize(("name", "fields", "message"), OTHER_SCALES.values(), ids=OTHER_SCALES)
def test_scales_of_other_formats_are_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    file = tmp_path / name
    own = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(own | fields))
    assert LLM(tmp_path, device="cpu", dtype="float32").engine.layout.dtype == "float32"
    with pytest.raises(ModelLoadError, match=message):
        make(tmp_path)


def test_workers_whose_caches_differ_have_different_identities() -> None:
    """By which the router and the other side of a link name what differs."""
    one, other = (
        LLM("demo", device="cpu", kv_cache_dtype=dtype).engine.model_identity
        for dtype in ("fp8", "auto")
    )
    difference = first_difference(one, other, "it", "decode-0")
    assert difference == "it has kv_format float8_e4m3fn, decode-0 float32"
    same = {"kv_format": other.kv_format}
    assert msgspec.structs.replace(one, **same) == other


def test_a_block_has_half_the_bytes_of_bfloat16() -> None:
    plain = LLM("demo", device="cpu", dtype="bfloat16").engine.layout
    assert 2 * make("demo").engine.layout.block_bytes == plain.block_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "auto"])
def test_transformers_code_says_that_it_does_not_use_scales(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kv_cache_dtype: str
) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-2-odd-vocabulary")
    edit(tmp_path, {"model.layers.0.self_attn.k_scale": torch.full((1,), 0.5)})
    with caplog.at_level("INFO", "pagewire"):
        LLM(
            tmp_path,
            device="cpu",
            dtype="float32",
            model_impl="transformers",
            kv_cache_dtype=kv_cache_dtype,
        )
    text = "scales for a KV cache in FP8, which --model-impl transformers does not use: they are 1"
    (level,) = [each.levelname for each in caplog.records if text in each.getMessage()]
    assert level == ("WARNING" if kv_cache_dtype == "fp8" else "INFO")


def test_transformers_code_caches_in_fp8() -> None:
    prompts = random_prompts((60, 9), VOCAB)
    assert answers(make("demo", model_impl="transformers"), prompts) == answers(
        make("demo"), prompts
    )


@pytest.mark.parametrize("name", ["fp8_e5m2", "int8", "nvfp4", "turboquant"])
def test_other_formats_are_refused_with_what_is_possible(name: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be '{name}': input should be 'auto' or 'fp8'"):
        LLM("demo", device="cpu", kv_cache_dtype=name)


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "deepseekv3", "groups-of-2-odd-vocabulary")
    with pytest.raises(ModelLoadError, match="--kv-cache-dtype fp8 is not for DeepseekV3"):
        make(tmp_path)
