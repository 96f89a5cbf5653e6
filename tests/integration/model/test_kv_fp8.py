"""KV caches in FP8 against Hugging Face's code with keys and values that are rounded so.

What is cached of a token depends on the token alone, and attention reads only the cache. So chunks,
preemption and cached prefixes change no token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import is_greedy
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
    llm.engine.core.scheduler.check_integrity()
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


def test_a_block_has_half_the_bytes_of_bfloat16() -> None:
    plain = LLM("demo", device="cpu", dtype="bfloat16").engine.layout
    assert 2 * make("demo").engine.layout.block_bytes == plain.block_bytes


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "deepseekv3", "groups-of-2-odd-vocabulary")
    with pytest.raises(ModelLoadError, match="--kv-cache-dtype fp8 is not for DeepseekV3"):
        make(tmp_path)
