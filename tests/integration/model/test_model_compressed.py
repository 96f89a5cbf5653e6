"""Checkpoints that compressed-tensors wrote, against Hugging Face's code on what it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from pagewire.shared.model.config import load_config
from pagewire.shared.worker.estimate import weight_bytes
from pagewire.tests.support.compressed_checkpoints import write_compressed
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.quantised_checkpoints import check_greedy_tokens, load, run
from pagewire.tests.support.tiny_models import VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # of the largest logit, in float32
HEAD = ["lm_head", "re:.*\\.gate$"]
SOME = [*HEAD, "model.layers.1.self_attn.q_proj", "re:.*layers\\.0\\.mlp.*"]
MIXED, EXPERTS = "deepseekv3-fp8-and-int4-experts", "re:.*mlp\\.experts.*"
PLAIN = "groups-of-2-odd-vocabulary"
# The library reads whole blocks only.
OF_BLOCKS = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 32, "v_head_dim": 16,
}  # fmt: skip
# family, shape, the library's name of a scheme, what differs from it, names that are ignored
CASES: dict[str, tuple[str, str, str, dict[str, Any], list[str]]] = {
    "llama-int4": ("llama", "biases", "W4A16", {"group_size": 16}, HEAD),
    "qwen3-int4-asymmetric-some": ("qwen3", "biases", "W4A16_ASYM", {"group_size": 16}, SOME),
    "qwen3moe-int4": ("qwen3moe", PLAIN, "W4A16", {"group_size": 4}, HEAD),
    "deepseekv3-int4-asymmetric": ("deepseekv3", PLAIN, "W4A16_ASYM", {"group_size": 2}, HEAD),
    "mixtral-int4-of-rows": (
        "mixtral", "window", "W4A16", {"group_size": None, "strategy": "channel"}, HEAD,
    ),
    "llama-fp8-static": ("llama", "biases", "FP8", {}, HEAD),
    "qwen3-fp8-some": ("qwen3", "biases", "FP8_DYNAMIC", {}, SOME),
    "qwen3moe-fp8": ("qwen3moe", PLAIN, "FP8_DYNAMIC", {}, HEAD),
    MIXED: ("deepseekv3", PLAIN, "W4A16", {"group_size": 4}, HEAD),
    "deepseekv3-fp8-blocks": ("deepseekv3", PLAIN, "FP8_BLOCK", {"block_structure": [8, 32]}, HEAD),
}  # fmt: skip


def write(path: Path, name: str) -> Any:
    """Write a checkpoint to `stored`; return Hugging Face's model of the weights it stands for."""
    family, shape, preset, changes, ignored = CASES[name]
    sizes = OF_BLOCKS if preset == "FP8_BLOCK" else {}
    kind = type(write_tiny_model(path / "plain", family, shape, **sizes))
    schemes = [_scheme(preset, changes)]
    if name == MIXED:
        schemes = [
            _scheme("FP8_DYNAMIC", {}, "re:.*self_attn.*"),
            _scheme(preset, changes, EXPERTS),
        ]
    write_compressed(path / "plain", path / "stored", path / "meant", schemes, ignored)
    return kind.from_pretrained(
        path / "meant", dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _scheme(preset: str, changes: dict[str, Any], target: str = "Linear") -> QuantizationScheme:
    """Return the library's scheme of a name, with these changes of weights."""
    fields = preset_name_to_scheme(preset, [target]).model_dump()
    fields["weights"].update(changes)
    if "block_structure" in changes:
        fields["input_activations"]["group_size"] = changes["block_structure"][1]
    return QuantizationScheme(**fields)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_what_the_library_makes_of_the_weights(tmp_path: Path, name: str) -> None:
    theirs = write(tmp_path, name)
    model = load(tmp_path / "stored")
    kinds = (torch.uint8, torch.float8_e4m3fn)
    assert any(each.dtype in kinds for each in model.stored())
    prompts = random_prompts((60, 60), VOCAB)
    with torch.inference_mode():
        expected = theirs(torch.tensor(prompts)).logits
    error = (run(model, prompts) - expected).abs().max()
    assert error <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_config_json_says_the_bytes_of_the_loaded_model(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    stored = sum(each.nbytes for each in load(tmp_path / "stored", torch.bfloat16).stored())
    assert weight_bytes(load_config(tmp_path / "stored"), torch.bfloat16) == stored


@pytest.mark.parametrize("name", ["qwen3moe-int4", "deepseekv3-fp8-blocks"])
def test_greedy_tokens_of_the_engine(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    check_greedy_tokens(tmp_path)
