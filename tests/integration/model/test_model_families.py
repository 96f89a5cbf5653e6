"""Every family over paged KV against Hugging Face's own modelling code, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagewire.kernels import BackendName, load_ops
from pagewire.shared.model.config import load_config
from pagewire.shared.model.layers.decoder import DecoderModel
from pagewire.shared.model.loader import load_model
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import check_greedy_answers
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.tiny_models import CASES, VOCAB, Pair, write_tiny_model

TOLERANCE = 1e-4  # of the largest logit
BLOCK_SIZE = 8
ANSWERS = [24, pytest.param(64, marks=pytest.mark.exhaustive)]  # tokens
PROMPTS = (1, 9, 40)  # lengths


def load(path: Path, backend: BackendName = "torch", device: str = "cpu") -> DecoderModel:
    config = load_config(path)
    ops = load_ops(backend, device)
    longest = config.max_position_embeddings
    if config.rope.is_long(longest):  # the answers here end before Hugging Face changes factors
        longest = config.rope.original_max_position_embeddings
    where = torch.device(device)
    return load_model(path, config, where, torch.float32, ops, max_positions=longest)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("model")
    return Pair(write_tiny_model(path, *request.param), load(path))


@pytest.mark.parametrize("answer", ANSWERS)
def test_greedy_answers_and_their_logits(
    pair: Pair, answer: int, record_property: Callable[[str, object], None]
) -> None:
    paged = PagedModel(pair.ours, num_blocks=64, block_size=BLOCK_SIZE, seed=3)
    prompts = random_prompts(PROMPTS, VOCAB)
    ties = check_greedy_answers(paged, prompts, answer, pair.expected, TOLERANCE)
    record_property("near_ties", ties)


def test_chunks_and_decode_rows_in_one_batch(pair: Pair) -> None:
    paged = PagedModel(pair.ours, num_blocks=64, block_size=BLOCK_SIZE, seed=3)
    sequences = [paged.add(prompt) for prompt in random_prompts((77, 66, 121), VOCAB)]
    paged.run_mixed(sequences, max_chunk=23)
    for sequence in sequences:
        expected = pair.expected(sequence.token_ids)
        error = (torch.stack(sequence.logits) - expected).abs().max()
        assert error <= TOLERANCE * expected.abs().max()


def test_hidden_states_of_some_rows(pair: Pair) -> None:
    paged = PagedModel(pair.ours, num_blocks=64, block_size=BLOCK_SIZE, seed=3)
    sequences = [paged.add(prompt) for prompt in random_prompts((20, 9, 33, 40), VOCAB)]
    paged.step([], [(sequence, 5) for sequence in sequences])
    batch = paged.batch(sequences[:2], [(sequences[2], 7), (sequences[3], 11)], padding_rows=2)
    before = paged.pool.clone()
    every = pair.ours.forward(batch, paged.layers)
    written = paged.pool.clone()
    for rows in ([], [2], [0, 1, 8, 19, 0, 0]):
        paged.pool.copy_(before)
        ended: list[int] = []
        index = torch.tensor(rows, dtype=torch.int64)
        some = pair.ours.forward(batch, paged.layers, ended.append, index)
        torch.testing.assert_close(some, every[rows], rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(paged.pool, written, rtol=TOLERANCE, atol=TOLERANCE)
        assert ended == list(range(len(pair.ours.layers)))


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="interpreter"),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("family", "shape", "changes"),
    [
        ("llama", "biases", {"head_dim": 24}),
        ("qwen3", "groups-of-7", {"num_attention_heads": 7, "num_key_value_heads": 1}),
        ("olmo2", "groups-of-2-odd-vocabulary", {"hidden_size": 64}),
        ("granite", "biases", {"hidden_size": 64}),
        ("smollm3", "rotation-by-layer", {"hidden_size": 64}),
        ("phi3", "part-of-a-head", {"hidden_size": 64}),
        ("mixtral", "own-head-size", {}),
        ("mixtral", "window", {"hidden_size": 64}),
        ("cohere", "biases", {"hidden_size": 64}),
        ("cohere2", "windows-by-layer", {"hidden_size": 64, "layer_types": ["sliding_attention"]}),
        ("granitemoe", "biases-one-of-three", {"hidden_size": 64}),
        ("qwen2moe", "some-dense-layers", {"hidden_size": 64, "mlp_only_layers": []}),
        ("mistral", "window-groups-of-2", {"hidden_size": 64}),
        ("olmo3", "yarn", {"hidden_size": 64, "layer_types": ["sliding_attention"]}),
        ("gptoss", "windows-by-layer", {"hidden_size": 64, "layer_types": ["sliding_attention"]}),
        ("gemma2", "groups-of-2-odd-vocabulary", {"head_dim": 16}),
        ("gemma3", "linear", {"head_dim": 16, "layer_types": ["sliding_attention"]}),
        ("deepseekv2", "query-latents-biases", {"first_k_dense_replace": 0}),
        ("deepseekv3", "biases-halves-rotated", {"first_k_dense_replace": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_triton_kernels(
    tmp_path: Path, family: str, shape: str, changes: dict[str, int], device: str
) -> None:
    """Head sizes are multiples of 8, as the attention kernels have them."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    pair = Pair(
        write_tiny_model(tmp_path, family, shape, num_hidden_layers=1, **changes),
        load(tmp_path, "triton", device),
    )
    source = random.Random(5)
    paged = PagedModel(pair.ours, num_blocks=16, block_size=16, seed=5)
    sequences = [paged.add([source.randrange(VOCAB) for _ in range(n)]) for n in (2, 18)]
    paged.step([], [(sequence, sequence.remaining - 1) for sequence in sequences])
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    batch = paged.batch(sequences, [])
    assert len(pair.ours.forward(batch, paged.layers, rows=nothing)) == 0
    paged.step(sequences, [], padding_rows=1)
    for sequence in sequences:
        expected = pair.expected(sequence.token_ids)
        error = (torch.stack(sequence.logits).cpu() - expected).abs().max()
        assert error <= TOLERANCE * expected.abs().max()
