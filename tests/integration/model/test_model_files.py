"""Odd config.json files against Hugging Face's AutoModelForCausalLM, over paged KV in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire.tests.integration.model.test_model_families import BLOCK_SIZE, TOLERANCE, load
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import check_greedy_answers
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.tiny_models import VOCAB, Pair, write_tiny_model

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"sliding_window": 8, "layer_types": [FULL, SLIDING, FULL]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OLDER = {"rope_parameters": None, "rope_theta": 700.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-by-layer": ("mistral", MIXED),
    "mistral-full-by-layer": ("mistral", {**MIXED, "layer_types": [FULL] * 3}),
    "mistral-without-kinds": ("mistral", {**MIXED, "layer_types": None}),
    "qwen2-full-by-an-older-name": (
        "qwen2",
        {**MIXED, "use_sliding_window": True, "layer_types": ["attention", SLIDING, "attention"]},
    ),
    "llama-full-by-layer": ("llama", {"sliding_window": 8, "layer_types": [FULL] * 3}),
    "phi3-full-by-layer": ("phi3", {"sliding_window": 8, "layer_types": [FULL] * 3}),
    "olmo3-older-base": ("olmo3", OLDER),
    "olmo3-older-scaling": ("olmo3", {**OLDER, "rope_scaling": YARN}),
    "olmo3-one-kind-and-older-base": (
        "olmo3",
        {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.5}}, "rope_theta": 700.0},
    ),
    "olmo3-first-length-outside": (
        "olmo3",
        {**OLDER, "rope_scaling": YARN, "original_max_position_embeddings": 32},
    ),
    "gemma3-older-bases": ("gemma3", {**OLDER, "rope_local_base_freq": 44.0}),
    "gemma3-older-scaling": ("gemma3", {**OLDER, "rope_scaling": YARN}),
    "gptoss-empty-scaling": ("gptoss", {**OLDER, "rope_scaling": {}}),
}


@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_files_are_read_as_hugging_face_reads_them(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    write_tiny_model(tmp_path, family, "groups-of-2-odd-vocabulary")
    file = tmp_path / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    if content["rope_parameters"] is None:
        del content["rope_parameters"]
    file.write_text(json.dumps(content))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    pair = Pair(theirs, load(tmp_path))
    prompts = random_prompts((9, 40), VOCAB)
    paged = PagedModel(pair.ours, num_blocks=64, block_size=BLOCK_SIZE, seed=3)
    check_greedy_answers(paged, prompts, 16, pair.expected, TOLERANCE)
    for prompt in prompts:  # with keys in a cache, too
        answer = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )[0].tolist()
        assert (
            pair.expected(answer)[len(prompt) - 1 : -1].argmax(-1).tolist() == answer[len(prompt) :]
        )
