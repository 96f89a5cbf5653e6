"""The config.json of published models: read as transformers reads it, or refused with the reason.

`tests/support/published_configs` has them, but for their long lists of rotary factors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.shared.worker.estimate import weight_bytes
from pagewire.tests.support.hf_configs import assert_same

PUBLISHED = Path(__file__).parents[2] / "support" / "published_configs"
# Of the tensors on the hub, a tied head counted once, layers that predict further tokens left out.
PARAMETERS = {
    "deepseek-v2-lite-chat": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gemma-2-27b-it": 27_227_128_320,
    "gemma-2-2b-it": 2_614_341_888,
    "gemma-2-9b-it": 9_241_705_984,
    "gemma-3-12b-it": 11_766_034_176,
    "gemma-3-1b-it": 999_885_952,
    "gemma-3-27b-it": 27_009_346_304,
    "gemma-3-4b-it": 3_880_263_168,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "granite-3.1-3b-a800m-instruct": 3_298_793_472,
    "granite-3.3-8b-instruct": 8_170_864_640,
    "granite-4.0-micro": 3_402_836_480,
    "llama-2-7b-chat": 6_738_415_616,
    "llama-3.1-8b-instruct": 8_030_261_248,
    "llama-3.2-1b-instruct": 1_235_814_400,
    "llama-3.3-70b-instruct": 70_553_706_496,
    "ministral-8b-instruct-2410": 8_019_808_256,
    "mistral-7b-instruct-v0.3": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-nemo-instruct-2407": 12_247_782_400,
    "mistral-small-24b-instruct-2501": 23_572_403_200,
    "mistral-small-3.2-24b-instruct-2506": 23_572_403_200,
    "mixtral-8x7b-instruct-v0.1": 46_702_792_704,
    "moonlight-16b-a3b-instruct": 15_960_110_208,
    "olmo-2-1124-7b-instruct": 7_298_617_344,
    "olmo-3-7b-instruct": 7_298_011_136,
    "phi-3-medium-128k-instruct": 13_960_238_080,
    "phi-3-medium-4k-instruct": 13_960_238_080,
    "phi-3-mini-128k-instruct": 3_821_079_552,
    "phi-3-mini-4k-instruct": 3_821_079_552,
    "phi-3.5-mini-instruct": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "phi-4-mini-instruct": 3_836_021_760,
    "qwen1.5-moe-a2.7b-chat": 14_315_784_192,
    "qwen2.5-0.5b-instruct": 494_032_768,
    "qwen2.5-7b-instruct": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-30b-a3b-thinking-2507": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b-instruct-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm3-3b": 3_075_098_624,
}
# Of the files on the hub, whose experts are in MXFP4.
BYTES = {"gpt-oss-20b": 13_761_264_768, "gpt-oss-120b": 65_248_815_744}


def content_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())
    return content


def write(path: Path, content: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(content))
    return path


def test_every_file_has_its_number_of_parameters() -> None:
    assert {file.stem for file in PUBLISHED.iterdir()} == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    content = content_of(name)
    content.pop("quantization_config", None)
    theirs = AutoConfig.from_pretrained(write(tmp_path, content))
    text = theirs.get_text_config()
    text.eos_token_id = getattr(theirs, "eos_token_id", text.eos_token_id)  # of the outer object
    assert_same(tmp_path, text)
    ours = load_config(tmp_path)
    named = content.get("dtype") or content.get("torch_dtype") or "float32"
    assert ours.dtype == named
    assert weight_bytes(ours, torch.float32) == 4 * PARAMETERS[name]


@pytest.mark.parametrize("name", BYTES)
def test_a_model_in_mxfp4_takes_the_bytes_of_its_files(tmp_path: Path, name: str) -> None:
    found = weight_bytes(load_config(write(tmp_path, content_of(name))), torch.bfloat16)
    assert found == pytest.approx(BYTES[name], rel=1e-4)


def test_a_model_in_fp8_takes_its_bytes(tmp_path: Path) -> None:
    """A byte for a parameter, a scale for a block of them; two bytes for those in bfloat16."""
    config = load_config(write(tmp_path, content_of("deepseek-v3")))
    embeddings = 2 * 129_280 * 7168
    key_value_matrices = 61 * 128 * (128 + 128) * 512  # made what the absorbed form multiplies
    routers = 58 * 256 * 7168 * 3  # in float32
    found = weight_bytes(config, torch.bfloat16)
    scales = PARAMETERS["deepseek-v3"] * 4 / (128 * 128)
    expected = PARAMETERS["deepseek-v3"] + embeddings + key_value_matrices + routers + scales
    assert found == pytest.approx(expected, rel=1e-4)


SIZES = {
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32064,
}
TEXT = "it takes more than text (text_config)"
STATE = "some of its layers keep a state other than keys and values"
HINT = "--model-impl transformers runs it by Hugging Face's"
# Of each model what decides, and a part of the reason.
NOT_SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "Phi-3-small-8k-instruct": (
        {
            "architectures": ["Phi3SmallForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_phi3_small.Phi3SmallForCausalLM"},
            "blocksparse_block_size": 64,
            **SIZES,
        },
        "(its attention is sparse by blocks)",
    ),
    "Phi-3.5-MoE-instruct": (
        {"architectures": ["PhiMoEForCausalLM"], "num_local_experts": 16},
        ": it has a mixture of experts of another kind",
    ),
    "granite-4.0-h-micro": (
        {
            **SIZES,
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 26,
            "num_local_experts": 0,
        },
        "layer_types has 'mamba': layers that keep a state other than keys and values",
    ),
    "Qwen3-Next-80B-A3B-Instruct": (
        {"architectures": ["Qwen3NextForCausalLM"], "linear_conv_kernel_dim": 4, **SIZES},
        f": {STATE} (linear_conv_kernel_dim)",
    ),
    "Qwen2.5-VL-7B-Instruct": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vision_config": {"hidden_size": 1280},
            **SIZES,
        },
        ": it takes more than text (vision_config)",
    ),
    "Llama-4-Scout-17B-16E-Instruct": (
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"a": 1}},
        f": {TEXT}",
    ),
    "Ministral-3-8B-Instruct-2512-BF16": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {"model_type": "ministral3"},
        },
        "text_config of model_type 'ministral3' is not supported: it scales queries by their",
    ),
    "gemma-3n-E4B-it": (
        {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {"a": 1}},
        f": {TEXT}",
    ),
    "DeepSeek-V3.2": (
        {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048, "kv_lora_rank": 512},
        ": its attention chooses among the tokens (index_topk)",
    ),
    "flan-t5-base": (
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        ": it has an encoder (is_encoder_decoder)",
    ),
    "bert-base-uncased": ({"architectures": ["BertForMaskedLM"]}, ": it is not a decoder by its"),
    "Qwen3-8B-FP8": (
        {**SIZES, "architectures": ["Qwen3ForCausalLM"], "quantization_config": {"bits": 8}},
        "quantization_config: names no quant_method; supported are checkpoints in FP8",
    ),
}


@pytest.mark.parametrize(("content", "reason"), NOT_SERVED.values(), ids=NOT_SERVED)
def test_others_are_refused_with_the_reason(
    tmp_path: Path, content: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_config(write(tmp_path, content))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "brings_code"),
    [("GemmaForCausalLM", False), ("InternLM2ForCausalLM", True), ("Phi3SmallForCausalLM", True)],
)
def test_the_other_way_is_named_with_what_it_depends_on(
    tmp_path: Path, architecture: str, brings_code: bool
) -> None:
    """Whether transformers has the code, the router cannot ask."""
    content: dict[str, Any] = {"architectures": [architecture], **SIZES}
    if brings_code:
        content["auto_map"] = {"AutoModelForCausalLM": f"modeling.{architecture}"}
    with pytest.raises(ModelLoadError, match=HINT) as caught:
        load_config(write(tmp_path, content))
    depends = "if that has this architecture: code that a model brings along is not run"
    assert (depends in str(caught.value)) == brings_code
