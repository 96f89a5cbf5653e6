"""Reading a model directory's configuration: Hugging Face's meaning, and clear refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import config_digest, load_config, model_fingerprint
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.model.families import ARCHITECTURES
from pagewire.shared.model.rope_config import RopeConfig
from pagewire.shared.request.sampling_types import MAX_EOS_TOKEN_IDS
from pagewire.tests.support.hf_configs import assert_same, config_class, needed_fields

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def _write(path: Path, content: dict[str, Any] | str, name: str = "config.json") -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (path / name).write_text(text, encoding="utf-8")
    return path


def _llama(**fields: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **fields}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_hugging_faces(tmp_path: Path, architecture: str) -> None:
    needed = needed_fields(architecture)
    _write(tmp_path, {"architectures": [architecture], **needed})
    assert_same(tmp_path, config_class(architecture)(**needed).get_text_config())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_hugging_face_writes_is_read_alike(tmp_path: Path, architecture: str) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "rms_norm_eps": 1e-4,
        "max_position_embeddings": 131_077,  # more than what YaRN would make of it
        "tie_word_embeddings": True,
        "bos_token_id": 3,
        "eos_token_id": [4, 5],
        "rope_theta": 1234.5,
        **needed_fields(architecture),
    }
    if architecture.startswith("Deepseek"):  # whose heads share what they cache
        sizes |= {"num_key_value_heads": 6, "head_dim": 64}
    if architecture.endswith("ForConditionalGeneration"):
        text = {**sizes, "model_type": "mistral"} if architecture.startswith("Mistral") else sizes
        sizes = {"text_config": text, **needed_fields(architecture)}
    config = config_class(architecture)(architectures=[architecture], **sizes)
    config.save_pretrained(tmp_path)
    assert_same(tmp_path, config.get_text_config())


def test_old_style_rope_scaling(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path, LLAMA_3_1_8B))
    assert config.rope == RopeConfig("llama3", 500_000.0, 8.0, 1.0, 4.0, 8192)
    assert config.dtype == "bfloat16"
    assert config.head_dim == 128
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.max_position_embeddings == 131072


def test_new_style_rope_parameters_say_the_same(tmp_path: Path) -> None:
    old = load_config(_write(tmp_path, LLAMA_3_1_8B))
    new = {k: v for k, v in LLAMA_3_1_8B.items() if k not in ("rope_scaling", "rope_theta")}
    scaling: Any = LLAMA_3_1_8B["rope_scaling"]
    new["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    assert load_config(_write(tmp_path, new)) == old


def test_a_type_under_its_older_name(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 4}
    config = load_config(_write(tmp_path, _llama(rope_scaling=scaling, rope_theta=100)))
    assert config.rope == RopeConfig("linear", 100.0, 4.0)


_ENDS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str | None, tuple[int, ...]]] = {
    "list": ({"eos_token_id": [7, 8]}, {"eos_token_id": 5}, None, (7, 8, 5)),
    "one": ({"eos_token_id": 9}, {"eos_token_id": [5, 9]}, None, (9, 5)),
    "null": ({"eos_token_id": None}, {"eos_token_id": 5}, None, (5,)),
    "without": ({}, {"eos_token_id": 5}, None, (5,)),
    "no-file": (None, {"eos_token_id": 5}, None, (5,)),
    "null-in-config": ({"eos_token_id": 9}, {"eos_token_id": None}, None, (9,)),
    "the-familys-default": (None, {}, None, (2,)),
    "default-that-no-file-names": ({"eos_token_id": 9}, {}, None, (9,)),
    "the-tokenizers": ({"eos_token_id": 9}, {"eos_token_id": 5}, "<|assistant|>", (9, 5, 4)),
    "the-tokenizers-alone": (None, {"eos_token_id": None}, "<|assistant|>", (4,)),
    "added-by-its-name": (None, {"eos_token_id": 5}, "<new>", (5, 2048)),
    "named-twice": ({"eos_token_id": [4, 9]}, {"eos_token_id": 4}, "<|assistant|>", (4, 9)),
    "without-a-row": (None, {"eos_token_id": 5, "vocab_size": 2048}, "<new>", (5,)),
}


@pytest.mark.parametrize(("generation", "config", "named", "expected"), _ENDS.values(), ids=_ENDS)
def test_end_tokens_are_all_that_any_file_names(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    named: str | None,
    expected: tuple[int, ...],
) -> None:
    _write(tmp_path, _llama(**config))
    if generation is not None:
        _write(tmp_path, generation, "generation_config.json")
    if named is not None:
        shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)
        _write(tmp_path, {"eos_token": named}, "tokenizer_config.json")
    assert load_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("token_id", [300, 99_999, 2**31, 10**30])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("several", [False, True])
def test_an_end_token_beyond_the_vocabulary_is_refused(
    tmp_path: Path, name: str, token_id: int, several: bool
) -> None:
    _write(tmp_path, _llama(vocab_size=300))
    eos = {"eos_token_id": [2, token_id, 3] if several else token_id}
    _write(tmp_path, _llama(vocab_size=300) | eos if name == "config.json" else eos, name)
    with pytest.raises(ModelLoadError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / name}: eos_token_id names token {token_id}, but vocab_size is 300: remove "
        "it, since the model cannot produce it"
    )


def test_the_last_token_of_the_vocabulary_may_end_an_answer(tmp_path: Path) -> None:
    _write(tmp_path, _llama(vocab_size=300, eos_token_id=299))
    assert load_config(tmp_path).eos_token_ids == (299,)
    _write(tmp_path, {"eos_token_id": [299, 0]}, "generation_config.json")
    assert load_config(tmp_path).eos_token_ids == (299, 0)


def test_end_tokens_of_a_text_model_count(tmp_path: Path) -> None:
    content = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}
    _write(tmp_path, {"eos_token_id": 9}, "generation_config.json")
    assert load_config(_write(tmp_path, content)).eos_token_ids == (9,)
    content["text_config"] = {"eos_token_id": 106}
    assert load_config(_write(tmp_path, content)).eos_token_ids == (9, 106)


def test_a_familys_default_end_token_counts_only_in_its_vocabulary(tmp_path: Path) -> None:
    fields = {"architectures": ["CohereForCausalLM"]}
    assert load_config(_write(tmp_path, fields)).eos_token_ids == (255_001,)
    assert load_config(_write(tmp_path, {**fields, "vocab_size": 300})).eos_token_ids == ()


def test_more_end_tokens_than_a_request_has_room_for_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, _llama())
    ends = list(range(MAX_EOS_TOKEN_IDS))
    _write(tmp_path, {"eos_token_id": ends * 2}, "generation_config.json")
    assert set(load_config(tmp_path).eos_token_ids) == set(ends)
    _write(tmp_path, {"eos_token_id": [*ends, 999]}, "generation_config.json")
    with pytest.raises(ModelLoadError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/generation_config.json: eos_token_id must be at most 64 token ids, not 65"
    )
    _write(tmp_path, {"eos_token_id": ends}, "generation_config.json")
    _write(tmp_path, _llama(eos_token_id=999))
    with pytest.raises(ModelLoadError) as caught:
        load_config(tmp_path)
    assert str(caught.value) == f"{tmp_path}: its files name 65 end tokens; at most 64 can be"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_file_without_a_dtype_means_that_of_the_weights(
    tmp_path: Path, dtype: str, shards: int
) -> None:
    """As with transformers' `dtype="auto"`. Without weights it is float32."""
    assert load_config(_write(tmp_path, _llama())).dtype == "float32"
    tensors = {
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(2),
        "model.norm.weight": torch.ones(8, dtype=getattr(torch, dtype)),
    }
    if shards == 1:
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        index = {"weight_map": dict.fromkeys(tensors, "a.safetensors")}
        _write(tmp_path, index, "model.safetensors.index.json")
        assert load_config(tmp_path).dtype == "float32"  # a router has the index alone
        save_file(tensors, tmp_path / "a.safetensors")
    assert load_config(tmp_path).dtype == dtype
    assert load_config(_write(tmp_path, _llama(torch_dtype="float16"))).dtype == "float16"


def test_the_dtype_of_a_part_counts(tmp_path: Path) -> None:
    save_file({"x": torch.ones(8)}, tmp_path / "model.safetensors")
    content: dict[str, Any] = {"architectures": ["Gemma3ForConditionalGeneration"]}
    content["text_config"] = {"torch_dtype": "bfloat16"}
    assert load_config(_write(tmp_path, content)).dtype == "bfloat16"


def test_biases_follow_the_architecture(tmp_path: Path) -> None:
    llama = load_config(_write(tmp_path, _llama(attention_bias=True, mlp_bias=True)))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = load_config(_write(tmp_path, {"architectures": ["Qwen2ForCausalLM"]}))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)


REFUSED = {
    "list-for-an-architecture": ({"architectures": [["a"]]}, "architecture ['a'] is not supported"),
    "other-architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        "architecture GPT2LMHeadModel is not supported: none of the families here has it",
    ),
    "no-architecture": ({"model_type": "llama"}, "names no architectures, such as"),
    "text-for-a-window": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": "4k"},
        "sliding_window must be a positive integer, not '4k'",
    ),
    "other-rope-type": (
        _llama(rope_parameters={"rope_type": "mrope"}),
        "rope type 'mrope' is not supported; supported are default, linear, dynamic, llama3, yarn",
    ),
    "rope-by-layer-type": (
        _llama(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "rotary parameters by layer type are not supported",
    ),
    "llama3-without-factor": (
        _llama(rope_scaling={"rope_type": "llama3", "low_freq_factor": 1.0}),
        "factor is missing",
    ),
    "partial-rotation": (_llama(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "quantised": (
        _llama(quantization_config={"quant_method": "gguf"}),
        "quant_method 'gguf' is not",
    ),
    "other-activation": (_llama(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    "other-dtype": (_llama(dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn' is not supported"),
    "text-for-a-size": (_llama(hidden_size="big"), "hidden_size must be a positive integer"),
    "truth-for-a-size": (_llama(num_hidden_layers=True), "num_hidden_layers must be a positive"),
    "too-many-layers": (
        _llama(num_hidden_layers=10**9),
        "num_hidden_layers must be at most 4096, not 1000000000",
    ),
    "negative-size": (_llama(vocab_size=-1), "vocab_size must be a positive integer, not -1"),
    "infinite-theta": (_llama(rope_theta=float("inf")), "rope_theta must be a positive number"),
    "number-for-a-flag": (_llama(attention_bias=1), "attention_bias must be true or false"),
    "text-for-a-token": (_llama(eos_token_id=["</s>"]), "eos_token_id must be a token id"),
    "uneven-groups": (_llama(num_attention_heads=6, num_key_value_heads=4), "not a multiple"),
    "odd-head": (_llama(head_dim=33), "head_dim (33) is odd"),
    "cut-off": ('{"architectures": ["Llam', "is not valid JSON"),
    "not-an-object": ("[1, 2]", "is not a JSON object"),
    "not-text": ("\x00\xff", "is not valid JSON"),
    "nested-too-deep": ("[" * 100_000, "is not valid JSON"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line_that_names_the_file(
    tmp_path: Path, content: dict[str, Any] | str, message: str
) -> None:
    _write(tmp_path, content)
    with pytest.raises(ModelLoadError) as caught:
        load_config(tmp_path)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json; pass a directory in Hugging"):
        load_config(tmp_path)


def test_corrupt_generation_config_is_named(tmp_path: Path) -> None:
    _write(_write(tmp_path, _llama()), "{", "generation_config.json")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not valid JSON"):
        load_config(tmp_path)


@pytest.fixture
def demo_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path(), tmp_path / "copy"))


def test_fingerprint_is_that_of_the_content(demo_copy: Path) -> None:
    demo = demo_model_path()
    config = load_config(demo)
    fingerprint = model_fingerprint(demo, config)
    assert fingerprint == model_fingerprint(demo_copy, config)
    assert len(fingerprint) == 32
    assert int(fingerprint, 16)


def test_config_digest_is_that_of_the_fields(demo_copy: Path) -> None:
    digest = config_digest(demo_model_path())
    fields = json.loads((demo_copy / "config.json").read_text(encoding="utf-8"))
    _write(demo_copy, json.dumps(dict(reversed(fields.items())), indent=3))
    assert config_digest(demo_copy) == digest
    _write(demo_copy, fields | {"rope_theta": 12345.0})
    assert config_digest(demo_copy) != digest


@pytest.mark.parametrize("where", ["config", "header", "first-tensor", "middle", "last-byte"])
def test_fingerprint_changes_with_the_content(demo_copy: Path, where: str) -> None:
    config = load_config(demo_copy)
    before = model_fingerprint(demo_copy, config)
    if where == "config":
        _write(demo_copy, (demo_copy / "config.json").read_text(encoding="utf-8") + "\n")
    else:
        _change_weights(demo_copy / "model.safetensors", where)
    assert model_fingerprint(demo_copy, config) != before


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_fingerprint_changes_with_a_description_of_quantised_weights(
    demo_copy: Path, name: str
) -> None:
    """Versions of GPTQ store zero points differently, and only this file may say which it is."""
    found = set()
    for layout in ("gptq", "gptq_v2"):
        described = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 16,
            "sym": True,
            "checkpoint_format": layout,
        }
        (demo_copy / name).write_text(json.dumps(described))
        found.add(model_fingerprint(demo_copy, load_config(demo_copy)))
    assert len(found) == 2


def _change_weights(file: Path, where: str) -> None:
    """Change one byte of the header or of a tensor's ends."""
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    middle = header["model.layers.2.mlp.up_proj.weight"]["data_offsets"][0]
    at = {"first-tensor": 0, "middle": middle, "last-byte": len(data) - 9 - length}
    if where == "header":
        name = data.index(b"model.layers.0")
        data[name : name + 14] = b"model.layers.9"
    else:
        data[8 + length + at[where]] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_fingerprint_changes_with_longropes_factors(
    demo_copy: Path, load_format: Literal["safetensors", "dummy"]
) -> None:
    config = load_config(demo_copy)
    factors = (1.0,) * (config.head_dim // 2)
    rope = RopeConfig(
        "longrope",
        original_max_position_embeddings=512,
        short_factors=factors,
        long_factors=factors,
    )
    config = dataclasses.replace(config, rope=rope, max_position_embeddings=1024)
    default, long, longer, short, shorter = (
        model_fingerprint(demo_copy, config, load_format, longest)
        for longest in (None, 513, 1024, 512, 16)
    )
    assert default == long == longer != short == shorter


def test_fingerprint_of_dummy_weights_needs_only_the_configuration(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path, LLAMA_3_1_8B))
    dummy = model_fingerprint(tmp_path, config, "dummy")
    assert dummy == model_fingerprint(tmp_path / "elsewhere", config, "dummy")
    other = load_config(_write(tmp_path, {**LLAMA_3_1_8B, "num_hidden_layers": 31}))
    assert dummy != model_fingerprint(tmp_path, other, "dummy")
    demo = demo_model_path()
    demo_config = load_config(demo)
    assert model_fingerprint(demo, demo_config) != model_fingerprint(demo, demo_config, "dummy")


def test_fingerprint_changes_with_the_ranks_if_each_makes_its_own_weights() -> None:
    demo = demo_model_path()
    plain, quantised = load_config(demo), load_config(demo, quantization="fp8")
    assert model_fingerprint(demo, plain) == model_fingerprint(demo, plain, ranks=2)
    for config, load_format in ((plain, "dummy"), (quantised, "dummy"), (quantised, "safetensors")):
        one, two, four = (
            model_fingerprint(demo, config, load_format, ranks=ranks) for ranks in (1, 2, 4)
        )
        assert len({one, two, four}) == 3


def test_configuration_and_source_import_no_torch() -> None:
    """The router reads both."""
    script = (
        "import sys\n"
        "from pagewire.shared.model import config, source\n"
        "path = source.resolve_model('demo')\n"
        "config.model_fingerprint(path, config.load_config(path))\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
