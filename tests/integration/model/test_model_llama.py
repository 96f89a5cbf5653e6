"""The model over paged KV against Hugging Face's, whatever way the tokens are cut into steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pagewire.kernels import load_ops
from pagewire.shared.model.config import load_config
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.loader import load_model
from pagewire.shared.model.source import resolve_model
from pagewire.tests.support.paged_model import PagedModel, PagedSequence
from pagewire.tests.support.tiny_models import Pair, randomise

VOCAB = 97
BLOCK_SIZE = 4
LENGTHS = (1, 4, 23, 61)  # below, at and above block and chunk borders
ATOL = 1e-4

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))


FAMILIES = {
    "llama-one-group": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=True),
    "llama-groups-of-2": lambda: _llama(num_key_value_heads=2, head_dim=20),
    "llama-groups-of-4": lambda: _llama(num_key_value_heads=1, rms_norm_eps=1e-3),
    "llama-biases": lambda: _llama(num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": lambda: _llama(num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": lambda: _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 900.0, "factor": 2.5}
    ),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=16, sliding_window=None)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True)
    ),
}


def _load(path: Path, max_positions: int = 128) -> DecoderModel:
    config = load_config(path)
    cpu = torch.device("cpu")
    ops = load_ops("torch", "cpu")
    return load_model(path, config, cpu, torch.float32, ops, "safetensors", max_positions)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("model")
    theirs = FAMILIES[request.param]().eval()
    randomise(theirs)
    theirs.save_pretrained(path)
    return Pair(theirs, _load(path))


@pytest.fixture(scope="module")
def demo() -> Pair:
    path = resolve_model("demo")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return Pair(theirs, _load(path, 1024))


def _prompts(seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def _paged(model: DecoderModel, seed: int = 0) -> PagedModel:
    return PagedModel(model, num_blocks=64, block_size=BLOCK_SIZE, seed=seed)


def _check(pair: Pair, sequences: list[PagedSequence]) -> None:
    for sequence in sequences:
        expected = pair.expected(sequence.token_ids)
        actual = torch.stack(sequence.logits)
        torch.testing.assert_close(actual, expected, atol=ATOL, rtol=0)
        assert actual.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [1000, 7, 1], ids=["in-one-go", "chunks-of-7", "token-by-token"])
def test_prefill_in_chunks(pair: Pair, chunk: int) -> None:
    paged = _paged(pair.ours)
    sequences = [paged.add(prompt) for prompt in _prompts(1)]
    paged.run(sequences, chunk)
    _check(pair, sequences)


def test_whole_prompts_packed_into_one_batch(pair: Pair) -> None:
    paged = _paged(pair.ours)
    sequences = [paged.add(prompt) for prompt in _prompts(2)]
    paged.step([], [(sequence, sequence.remaining) for sequence in sequences])
    _check(pair, sequences)


def test_decode_rows_step_by_step(pair: Pair) -> None:
    paged = _paged(pair.ours)
    sequences = [paged.add(prompt) for prompt in _prompts(3)]
    paged.step([], [(sequence, 1) for sequence in sequences])
    while live := [sequence for sequence in sequences if sequence.remaining]:
        paged.step(live, [])
    _check(pair, sequences)


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches(pair: Pair, seed: int) -> None:
    paged = _paged(pair.ours, seed)
    sequences = [paged.add(prompt) for prompt in _prompts(seed)]
    paged.run_mixed(sequences, max_chunk=11)
    _check(pair, sequences)


def test_logits_are_far_from_constant(pair: Pair) -> None:
    """Guards the other tests: with tiny logits their tolerance would accept anything."""
    assert pair.expected(_prompts(1)[-1]).std() > 1.0


def test_padding_rows_leave_the_pool_alone(pair: Pair) -> None:
    paged = _paged(pair.ours)
    before = paged.pool.clone()
    paged.step([], [], padding_rows=3)
    assert torch.equal(paged.pool, before)


def test_demo_model_equals_hugging_face(demo: Pair) -> None:
    source = random.Random(5)
    vocab_size = demo.ours.config.vocab_size
    paged = PagedModel(demo.ours, num_blocks=64, block_size=16, seed=5)
    prompts = [[source.randrange(vocab_size) for _ in range(length)] for length in (3, 48, 300)]
    sequences = [paged.add(prompt) for prompt in prompts]
    paged.run_mixed(sequences, max_chunk=101)
    for sequence in sequences:
        expected = demo.expected(sequence.token_ids)
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=ATOL, rtol=0)


def test_demo_model_writes_what_hugging_face_writes(demo: Pair) -> None:
    prompt = [demo.ours.config.bos_token_id or 0, 300, 41, 977, 260]
    ends = list(demo.ours.config.eos_token_ids)
    text = demo.theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=48,
        min_new_tokens=48,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
    )[0].tolist()
    paged = PagedModel(demo.ours, num_blocks=8, block_size=16, seed=6)
    sequence = paged.add(text)
    paged.step([], [(sequence, len(prompt))])
    while sequence.remaining:
        paged.step([sequence], [])
    logits = torch.stack(sequence.logits[len(prompt) - 1 : -1])
    logits[:, ends] = -torch.inf  # as `min_new_tokens` has it
    assert logits.argmax(-1).tolist() == text[len(prompt) :]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decode_step_replays_as_a_cuda_graph(dtype: torch.dtype) -> None:
    path = resolve_model("demo")
    cuda = torch.device("cuda")
    ops = load_ops("triton", "cuda")
    model = load_model(path, load_config(path), cuda, dtype, ops, "safetensors", 1024)
    paged = PagedModel(model, num_blocks=64, block_size=16, seed=8)
    sequences = [paged.add(list(range(10, 10 + length))) for length in (5, 40, 130)]
    paged.step([], [(sequence, sequence.remaining - 1) for sequence in sequences])
    batch = paged.batch(sequences, [], padding_rows=1)
    eager = model.compute_logits(model.forward(batch, paged.layers))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model.compute_logits(model.forward(batch, paged.layers))
    with torch.inference_mode():
        captured.zero_()
    graph.replay()
    torch.testing.assert_close(captured[:3], eager[:3], atol=0, rtol=0)
