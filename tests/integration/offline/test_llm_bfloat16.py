from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

from pagewire import LLM, SamplingParams
from pagewire.tests.support.float32_reference import (
    compare_with_float32,
    random_prompts,
    write_random_llama,
)

CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    max_position_embeddings=512,
    rope_theta=500000.0,
    initializer_range=0.1,
)


def test_greedy_tokens_are_those_of_float32_wherever_its_choice_is_clear(tmp_path: Path) -> None:
    write_random_llama(tmp_path, CONFIG, "cpu")
    prompts = random_prompts((1, 17, 100, 300), 512)
    llm = LLM(str(tmp_path), device="cpu", dtype="bfloat16", max_num_batched_tokens=64)
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = [output.token_ids for output in llm.generate(prompts, greedy)]
    result = compare_with_float32(tmp_path, prompts, outputs, "cpu")
    assert result.wrong == []
    assert result.clear > 0.25, result


def test_other_tokens_are_found_wrong(tmp_path: Path) -> None:
    write_random_llama(tmp_path, CONFIG, "cpu")
    prompts = random_prompts((20,), 512)
    result = compare_with_float32(tmp_path, prompts, [list(range(64))], "cpu")
    assert len(result.wrong) >= 8
