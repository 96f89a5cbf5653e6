"""How config.json describes quantised weights: what is read, what is refused in one line."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.model.quantization.config import (
    Fp8Format,
    Int4Format,
    Mxfp4Format,
    QuantConfig,
    WeightFormat,
)

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
WEIGHTS_IN_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INPUTS_IN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
GROUP = {"weights": WEIGHTS_IN_FP8, "input_activations": INPUTS_IN_FP8, "targets": ["Linear"]}


def compressed(group: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    groups = {"group_0": {**GROUP, **(group or {})}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
        **fields,
    }


def weights(**fields: Any) -> dict[str, Any]:
    return compressed({"weights": {**WEIGHTS_IN_FP8, **fields}})


def inputs(**fields: Any) -> dict[str, Any]:
    return compressed({"input_activations": {**INPUTS_IN_FP8, **fields}})


def packed(group: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    own = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **fields}
    group = {"weights": own, "input_activations": None, **(group or {})}
    return compressed(group, format="pack-quantized")


def read(path: Path, raw: Any, **fields: Any) -> QuantConfig | None:
    content = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "quantization_config": raw,
        **fields,
    }
    (path / "config.json").write_text(json.dumps(content))
    return load_config(path).quantization


READ = {
    "blocks": ({**FP8, "weight_block_size": [128, 128], "fmt": "e4m3"}, Fp8Format(128, 128)),
    "one-scale": (FP8, Fp8Format(None, None)),
    "static": ({**FP8, "activation_scheme": "static"}, Fp8Format(None, None, "static")),
    "channels": (compressed(), Fp8Format(1, None)),
    "tensors": (weights(strategy="tensor"), Fp8Format(None, None)),
    "compressed-blocks": (
        weights(strategy="block", block_structure=[128, 64]), Fp8Format(128, 64)
    ),
    "blocks-as-text": (weights(strategy="block", block_structure="128x128"), Fp8Format(128, 128)),
    "static-inputs": (inputs(strategy="tensor", dynamic=False), Fp8Format(1, None, "static")),
    "inputs-of-tensors-that-are-dynamic": (inputs(strategy="tensor"), Fp8Format(1, None)),
    "weights-alone": (compressed({"input_activations": None}), Fp8Format(1, None, "none")),
    "awq": (AWQ, Int4Format("awq", 64)),
    "gptq": (GPTQ, Int4Format("gptq", 128)),
    "gptq-of-rows": ({**GPTQ, "group_size": -1}, Int4Format("gptq", None)),
    "gptq-v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2", "desc_act": True},
        Int4Format("gptq_v2", 128, ordered=True),
    ),
    "gptq-of-some": ({**GPTQ, "dynamic": {"-:.*down_proj": {}}}, Int4Format("gptq", 128)),
    "packed": (packed(), Int4Format("packed", 128, symmetric=True)),
    "packed-of-rows": (
        packed(strategy="channel", symmetric=False, group_size=None), Int4Format("packed", None)
    ),
    "packed-in-any-order": (
        packed(actorder="group"), Int4Format("packed", 128, symmetric=True, ordered=True)
    ),
    "older-name": (compressed(format="naive-quantized"), Fp8Format(1, None)),
    "empty-sparsity": (compressed(sparsity_config={}, transform_config={}), Fp8Format(1, None)),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "expected"), READ.values(), ids=READ)
def test_formats(tmp_path: Path, raw: dict[str, Any], expected: WeightFormat) -> None:
    found = read(tmp_path, raw)
    assert found is not None
    assert found.format_of("model.layers.0.mlp.up_proj") == expected


ADVICE = "supported are checkpoints in FP8 (quant_method fp8, compressed-tensors, modelopt), INT4 ("
REFUSED = {
    "awq-gemv": ({**AWQ, "version": "gemv"}, "version 'gemv' is not supported; only 'gemm'"),
    "awq-of-8-bits": (
        {**AWQ, "bits": 8},
        "weights of 8 bits (awq) are not supported; only 4 bits (INT4)",
    ),
    "awq-without-zeros": ({**AWQ, "zero_point": False}, "zero_point must be true"),
    "awq-groups": ({**AWQ, "group_size": "x"}, "group_size must be a positive integer, not 'x'"),
    "gptq-of-3-bits": (
        {**GPTQ, "bits": 3},
        "weights of 3 bits (gptq) are not supported; only 4 bits (INT4)",
    ),
    "gptq-marlin": (
        {**GPTQ, "checkpoint_format": "marlin"},
        "checkpoint_format 'marlin' is not supported; only gptq, gptq_v2",
    ),
    "gptq-dynamic": (
        {**GPTQ, "dynamic": {"-:lm_head": {}, "+:.*down_proj": {"bits": 8}}},
        "dynamic has '+:.*down_proj', which is not supported; only names that begin with '-:'",
    ),
    "gguf": ({"quant_method": "gguf"}, f"quant_method 'gguf' is not supported; {ADVICE}"),
    "modelopt-fp4": ({"quant_method": "modelopt_fp4"}, "'modelopt_fp4' is not supported; supp"),
    "quark": ({"quant_method": "quark"}, f"quant_method 'quark' is not supported; {ADVICE}"),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "quant_algo 'NVFP4' is not supported; only FP8",
    ),
    "modelopt-names": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "lm_head"},
        "ignore must be a list of names",
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; supp"),
    "no-method": ({"bits": 4}, f"names no quant_method; {ADVICE}"),
    "no-object": ([1], "quantization_config must be an object, not [1]"),
    "method-of-another-type": ({"quant_method": ["fp8"]}, "quant_method ['fp8'] is not supported"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not supported; only 'e4m3'"),
    "fp4-experts": ({**FP8, "expert_dtype": "fp4"}, "expert_dtype is not supported"),
    "scheme": ({**FP8, "activation_scheme": "no"}, "activation_scheme 'no' is not supported"),
    "one-number": ({**FP8, "weight_block_size": [128]}, "must be two positive integers, not [128]"),
    "odd-columns": (
        {**FP8, "weight_block_size": [128, 100]},
        "weight_block_size [128, 100] is not supported: the second number must be a power of two",
    ),
    "names": ({**FP8, "modules_to_not_convert": "lm_head"}, "must be a list of names"),
    "regex": (
        {**FP8, "modules_to_not_convert": ["re:("]},
        "modules_to_not_convert has '(', no regular expression",
    ),
    "int8": (
        weights(type="int"),
        "weights of 8 bits of type 'int' in format 'float-quantized' are not supported; supported",
    ),
    "int8-as-written": (
        compressed({"format": "int-quantized", "weights": {**WEIGHTS_IN_FP8, "type": "int"}}),
        "weights of 8 bits of type 'int' in format 'int-quantized' (INT8) are not supported; suppo",
    ),
    "mxfp4-of-any-projection": (
        compressed({"format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}}),
        "in format 'mxfp4-pack-quantized' (MXFP4) are not supported; supported are FP8",
    ),
    "packed-float": (compressed(format="pack-quantized"), "in format 'pack-quantized' are not"),
    "packed-with-inputs": (
        packed({"input_activations": INPUTS_IN_FP8}),
        "input_activations is not supported where weights have 4 bits",
    ),
    "packed-of-tensors": (packed(strategy="tensor"), "strategy 'tensor' is not supported"),
    "packed-of-8-bits": (packed(num_bits=8), "weights of 8 bits of type 'int' in format 'pack-q"),
    "packed-without-size": (packed(group_size=None), "group_size is missing"),
    "packed-in-some-order": (packed(actorder="x"), "actorder 'x' is not supported"),
    "nvfp4": (
        compressed({"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}}),
        "weights of 4 bits of type 'float' in format 'nvfp4-pack-quantized' (NVFP4) are not "
        "supported; supported are FP8 (8 bits of type 'float' in format float-quantized or "
        "naive-quantized) and INT4 (4 bits of type 'int' in format pack-quantized)",
    ),
    "groups": (weights(strategy="group", group_size=128), "strategy 'group' is not supported"),
    "asymmetric": (weights(symmetric=False), "weights must be symmetric"),
    "no-blocks": (weights(strategy="block"), "block_structure must be two positive integers"),
    "outputs": (compressed({"output_activations": INPUTS_IN_FP8}), "output_activations is not"),
    "inputs-in-int8": (inputs(type="int"), "only 8 bits of type 'float' (FP8) are supported"),
    "inputs-in-groups": (
        inputs(strategy="group", group_size=64),
        "strategy 'group' of group_size 64 is not supported; supported are token and tensor",
    ),
    "inputs-local": (inputs(dynamic="local"), "dynamic 'local' is not supported"),
    "sparse": (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
    "transforms": (compressed(transform_config={"config_groups": {"a": 1}}), "transform_config is"),
    "no-groups": (compressed(config_groups={}), "config_groups must be an object with groups"),
    "group-of-another-type": (compressed(config_groups={"a": 3}), "config_groups.a must be an"),
    "no-weights": (compressed({"weights": None}), "config_groups.group_0: weights is missing"),
    "targets": (compressed({"targets": [3]}), "targets must be a list of names"),
}


@pytest.mark.parametrize(("raw", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(tmp_path: Path, raw: Any, message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, raw)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    assert "\n" not in str(caught.value)


def test_older_field_of_compressed_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="compression_config is not supported; supported are"):
        read(tmp_path, None, compression_config={"format": "dense"})


NAMES = {
    "full-name": ("model.layers.1.mlp.up_proj", True),
    "layer": ("model.layers.2", True),
    "not-the-next-layer": ("model.layers.21.mlp.up_proj", False),
    "regular-expression": ("model.layers.3.self_attn.q_proj", True),
    "regular-expression-of-another": ("model.layers.4.self_attn.q_proj", False),
    "other": ("model.layers.1.mlp.down_proj", False),
}


@pytest.mark.parametrize(("name", "is_ignored"), NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("dialect", ["fp8", "compressed-tensors"])
def test_names_that_are_not_quantised(
    tmp_path: Path, dialect: str, name: str, is_ignored: bool
) -> None:
    ignored = ["model.layers.1.mlp.up_proj", "model.layers.2", "re:.*layers\\.3\\.self_attn.*"]
    raw = {**FP8, "modules_to_not_convert": ignored}
    found = read(tmp_path, raw if dialect == "fp8" else compressed(ignore=ignored))
    assert found is not None
    full = f"{name}.self_attn.o_proj" if name.endswith("2") else name
    assert (found.format_of(full) is None) == is_ignored


def test_names_of_hugging_face_may_be_ends_inner_and_outer_ones(tmp_path: Path) -> None:
    names = ["o_proj", "model.language_model.layers.5", "language_model.model.layers.6.mlp", "7."]
    found = read(tmp_path, {**FP8, "modules_to_not_convert": names})
    assert found is not None
    for name in ("0.self_attn.o_proj", "5.mlp.up_proj", "6.mlp.up_proj", "7.mlp.up_proj"):
        assert found.format_of(f"model.layers.{name}") is None
    assert found.format_of("model.layers.0.mlp.up_proj") is not None
    for name in ("lm_head", "model.layers.0.mlp.gate"):  # never, unless a checkpoint has them so
        assert found.format_of(name) is None


def test_groups_are_taken_in_order(tmp_path: Path) -> None:
    blocks = {**WEIGHTS_IN_FP8, "strategy": "block", "block_structure": [128, 128]}
    raw = compressed()
    raw["config_groups"] = {
        "a": {**GROUP, "weights": blocks, "targets": ["re:.*self_attn.*", "model.layers.1.mlp"]},
        "b": GROUP,
    }
    found = read(tmp_path, raw)
    assert found is not None
    assert found.format_of("model.layers.0.self_attn.q_proj") == Fp8Format(128, 128)
    assert found.format_of("model.layers.1.mlp.up_proj") == Fp8Format(128, 128)
    assert found.format_of("model.layers.0.mlp.up_proj") == Fp8Format(1, None)


def test_groups_of_names_come_before_those_of_classes(tmp_path: Path) -> None:
    """As compressed-tensors has it: names, then regular expressions, then classes."""
    blocks = {**WEIGHTS_IN_FP8, "strategy": "block", "block_structure": [128, 128]}
    tensors = {**WEIGHTS_IN_FP8, "strategy": "tensor"}
    raw = compressed()
    raw["config_groups"] = {
        "a": GROUP,
        "b": {**GROUP, "weights": blocks, "targets": ["re:.*mlp.*"]},
        "c": {**GROUP, "weights": tensors, "targets": ["model.layers.0.mlp.up_proj"]},
    }
    found = read(tmp_path, raw)
    assert found is not None
    assert found.format_of("model.layers.0.mlp.up_proj") == Fp8Format(None, None)
    assert found.format_of("model.layers.1.mlp.up_proj") == Fp8Format(128, 128)
    assert found.format_of("model.layers.0.self_attn.q_proj") == Fp8Format(1, None)


def test_a_weight_of_which_groups_say_nothing(tmp_path: Path) -> None:
    """Its format is that of all groups, if they have the same."""
    blocks = {**WEIGHTS_IN_FP8, "strategy": "block", "block_structure": [128, 128]}
    name = "model.layers.0.mlp.up_proj"
    for first, second in ((WEIGHTS_IN_FP8, WEIGHTS_IN_FP8), (WEIGHTS_IN_FP8, blocks)):
        raw = compressed()
        raw["config_groups"] = {
            "a": {**GROUP, "weights": first, "targets": ["SomeLinear"]},
            "b": {**GROUP, "weights": second, "targets": ["re:.*self_attn.*"]},
        }
        found = read(tmp_path, raw)
        assert found is not None and found.format_of(name) is None
        found = replace(found, quantised=frozenset({name}))
        if first == second:
            assert found.format_of(name) == Fp8Format(1, None)
        else:
            with pytest.raises(ModelLoadError, match=f"^{name} is quantised, but none of the "):
                found.format_of(name)


def test_names_that_dynamic_excludes_are_not_quantised(tmp_path: Path) -> None:
    names = {"-:.*down_proj": {}, "-:model\\.layers\\.0\\.": {}}
    found = read(tmp_path, {**GPTQ, "dynamic": names, "modules_to_not_convert": ["o_proj"]})
    assert found is not None
    kept = ("1.mlp.down_proj", "0.mlp.up_proj", "1.self_attn.o_proj")
    assert all(found.format_of(f"model.layers.{name}") is None for name in kept)
    assert found.format_of("model.layers.1.mlp.up_proj") == Int4Format("gptq", 128)


def test_the_head_of_a_model_that_takes_images_has_a_name_of_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, compressed(ignore=["language_model.lm_head"]))
    assert found is not None
    assert found.format_of("lm_head") is None
    assert found.format_of("lm_heads") is not None


def test_a_quantised_cache_alone_is_no_quantised_weight(tmp_path: Path) -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert read(tmp_path, compressed(config_groups={}, kv_cache_scheme=cache)) is None


def test_only_experts_are_in_mxfp4(tmp_path: Path) -> None:
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.layers.1"]
    found = read(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": names})
    assert found is not None
    assert found.format_of("model.layers.0.mlp.experts.down_proj") == Mxfp4Format()
    for name in ("0.self_attn.q_proj", "0.mlp.router", "0.mlp.up_proj", "1.mlp.experts.down_proj"):
        assert found.format_of(f"model.layers.{name}") is None


def test_fp8_while_loading_is_not_for_checkpoints_in_int4(tmp_path: Path) -> None:
    read(tmp_path, AWQ)
    with pytest.raises(ModelLoadError, match=r"--quantization fp8 .* INT4 \(awq\)"):
        load_config(tmp_path, quantization="fp8")
    read(tmp_path, FP8)
    assert load_config(tmp_path, quantization="fp8") == load_config(tmp_path)


def test_a_description_in_a_file_of_its_own(tmp_path: Path) -> None:
    read(tmp_path, None)
    described = tmp_path / "hf_quant_config.json"
    described.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert load_config(tmp_path).quantization is None
    described.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    found = load_config(tmp_path).quantization
    assert found is not None
    assert found.format_of("model.layers.0.mlp.up_proj") == Fp8Format(None, None, "static")
    read(tmp_path, FP8)  # where config.json has one, it wins
    assert load_config(tmp_path).quantization != found


def test_code_of_transformers_does_not_take_it(tmp_path: Path) -> None:
    read(tmp_path, None, num_hidden_layers=1, max_position_embeddings=64, vocab_size=64)
    load_config(tmp_path, "transformers")
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 128}))
    with pytest.raises(ModelLoadError, match=r"quantised \(awq\), which --model-impl transformers"):
        load_config(tmp_path, "transformers")


def test_many_names_of_many_experts_are_looked_up_quickly(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.mlp.gate" for n in range(48)] + ["lm_head"]
    found = read(tmp_path, {**FP8, "modules_to_not_convert": names})
    assert found is not None
    start = time.process_time()
    for layer in range(48):
        for expert in range(128):
            assert found.format_of(f"model.layers.{layer}.mlp.experts.{expert}.up_proj")
    assert time.process_time() - start < 2
