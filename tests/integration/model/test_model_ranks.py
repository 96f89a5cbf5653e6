"""Models divided among ranks, against Hugging Face's own modelling code, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.shared.base.errors import ModelLoadError
from pagewire.shared.model.config import load_config
from pagewire.tests.support.float32_reference import random_prompts
from pagewire.tests.support.hf_greedy import check_greedy_answers
from pagewire.tests.support.paged_model import PagedModel
from pagewire.tests.support.thread_ranks import load_ranks
from pagewire.tests.support.tiny_models import CASES, VOCAB, Pair, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # of the largest logit
BLOCK_SIZE = 8
PROMPTS = (1, 9, 40)  # lengths
ANSWER = 12
# What divides differently: numbers of KV heads, biases, fused projections, norms over all heads,
# sinks, multipliers, parallel layers, experts, and latent vectors.
SHAPES = {
    "llama-groups-of-1-tied": (2, 4),
    "llama-groups-of-4-tied-odd-vocabulary": (2, 4),  # each rank has the only KV head
    "llama-biases": (4,),
    "qwen2-groups-of-7": (2,),
    "qwen2-yarn": (4,),
    "qwen3-biases": (2,),
    "mistral-window-groups-of-2": (2,),
    "gemma2-groups-of-2-odd-vocabulary": (4,),
    "gemma3-biases-and-cap": (2,),
    "olmo2-groups-of-2-odd-vocabulary": (2, 4),
    "olmo3-biases": (4,),
    "phi3-part-of-a-head": (2, 4),
    "cohere-biases": (2, 4),
    "cohere2-windows-by-layer": (2,),
    "granite-biases": (4,),
    "granitemoehybrid-biases-not-rotated": (2,),
    "smollm3-rotation-by-layer": (2,),
    "gptoss-groups-of-2-odd-vocabulary": (2, 4),
    "mixtral-own-head-size": (2,),
    "qwen2moe-some-dense-layers": (4,),
    "qwen3moe-renormalised-biases": (2,),
    "granitemoe-biases-one-of-three": (2,),
    "olmoe-renormalised-biases": (4,),
    "deepseekv2-query-latents-biases": (2, 4),
    "deepseekv3-yarn-without-query-latents": (4,),
}
EACH = [(name, count) for name, counts in SHAPES.items() for count in counts]
OTHERS = [
    (name, count)
    for name in CASES
    for count in (2, 4)
    if (name, count) not in EACH
    and not (name.endswith("of-7") and count == 4)  # 14 heads
    and "longrope" not in name  # Hugging Face's factors change with the length
]


@pytest.fixture(
    params=[*EACH, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in OTHERS)],
    ids=lambda each: f"{each[0]}-{each[1]}",
)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    name, count = request.param
    theirs = write_tiny_model(tmp_path, *CASES[name])
    with load_ranks(tmp_path, count) as ours:
        yield Pair(theirs, ours)


def test_greedy_answers_and_their_logits(pair: Pair) -> None:
    paged = PagedModel(pair.ours, num_blocks=64, block_size=BLOCK_SIZE, seed=3)
    prompts = random_prompts(PROMPTS, VOCAB)
    check_greedy_answers(paged, prompts, ANSWER, pair.expected, TOLERANCE)


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
        ("qwen2", "groups-of-7", {"hidden_size": 224}),
        ("olmo2", "groups-of-2-odd-vocabulary", {"hidden_size": 64}),
        ("gptoss", "windows-by-layer", {"hidden_size": 64, "layer_types": ["sliding_attention"]}),
        ("qwen2moe", "some-dense-layers", {"hidden_size": 64, "mlp_only_layers": []}),
        ("deepseekv2", "query-latents-biases", {"first_k_dense_replace": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_triton_kernels(
    tmp_path: Path, family: str, shape: str, changes: dict[str, Any], device: str
) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    theirs = write_tiny_model(tmp_path, family, shape, num_hidden_layers=1, **changes)
    with load_ranks(tmp_path, 2, "triton", device) as ours:
        pair = Pair(theirs, ours)
        paged = PagedModel(ours, num_blocks=16, block_size=16, seed=5)
        sequences = [paged.add(prompt) for prompt in random_prompts((2, 18), VOCAB)]
        paged.step([], [(sequence, sequence.remaining - 1) for sequence in sequences])
        paged.step(sequences, [], padding_rows=1)
        for sequence in sequences:
            expected = pair.expected(sequence.token_ids)
            error = (torch.stack(sequence.logits).cpu() - expected).abs().max()
            assert error <= TOLERANCE * expected.abs().max()


def test_what_is_kept_of_the_last_layer(tmp_path: Path) -> None:
    """Ranks add up the rows that are kept alone, also if there is none."""
    write_tiny_model(tmp_path, "cohere", "biases")
    with load_ranks(tmp_path, 2) as ours:
        paged = PagedModel(ours, num_blocks=16, block_size=BLOCK_SIZE, seed=3)
        sequence = paged.add(random_prompts((20,), VOCAB)[0])
        batch = paged.batch([], [(sequence, 20)])
        every = ours.forward(batch, paged.layers)
        for rows in ([], [19], [3, 0, 0]):
            some = ours.forward(batch, paged.layers, rows=torch.tensor(rows, dtype=torch.int64))
            torch.testing.assert_close(some, every[rows], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("family", "reduces"), [("llama", 2), ("cohere", 1), ("qwen2moe", 2)])
def test_a_layer_adds_up_no_more_than_it_must(tmp_path: Path, family: str, reduces: int) -> None:
    write_tiny_model(tmp_path, family, "groups-of-1-tied")
    with load_ranks(tmp_path, 2) as ours:
        paged = PagedModel(ours, num_blocks=16, block_size=BLOCK_SIZE, seed=3)
        paged.step([], [(paged.add([5, 6, 7]), 3)])
        counts = [each.calls for each in ours.communicators]
    assert counts == [1 + reduces * len(ours.layers)] * 2  # and once for the embeddings


@pytest.mark.parametrize(
    ("family", "batch_invariant", "expected"),
    [("llama", False, True), ("llama", True, False), ("cohere", False, False)],
)
def test_norms_add_up_where_that_changes_no_bits_of_a_row(
    tmp_path: Path, family: str, batch_invariant: bool, expected: bool
) -> None:
    write_tiny_model(tmp_path, family, "groups-of-1-tied")
    with load_ranks(tmp_path, 2, batch_invariant=batch_invariant) as ours:
        assert [model.norms_add_up for model in ours.models] == [expected] * 2


def test_each_rank_has_its_part_of_the_memory(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", "groups-of-1-tied", tie_word_embeddings=False)
    with load_ranks(tmp_path, 1) as one, load_ranks(tmp_path, 4) as four:
        [whole], parts = ([each.stored() for each in m.models] for m in (one, four))
        whole = [each for each in whole if each.dim() == 2]
        for part in parts:
            matrices = [each for each in part if each.dim() == 2]
            sizes = [(a.numel(), b.numel()) for a, b in zip(matrices, whole, strict=True)]
            assert len(sizes) == 2 + 3 * 4
            assert all(4 * part == all_of_it for part, all_of_it in sizes)
    layouts = [load_config(tmp_path).kv_layout(16, "float32", each) for each in four.shards]
    assert [each.token.heads for each in layouts] == [1] * 4


@pytest.mark.parametrize(
    ("shape", "ranks", "message"),
    [
        (
            "groups-of-7",
            4,
            "4 ranks cannot share 14 attention heads and 2 KV heads; possible numbers of ranks are "
            "1, 2, 14",
        ),
        (
            "groups-of-2-odd-vocabulary",
            3,
            "3 ranks cannot share 4 attention heads and 2 KV heads; possible numbers of ranks are "
            "1, 2, 4",
        ),
    ],
)
def test_numbers_of_ranks_that_do_not_divide_the_heads(
    tmp_path: Path, shape: str, ranks: int, message: str
) -> None:
    write_tiny_model(tmp_path, "llama", shape)
    with pytest.raises(ModelLoadError) as caught, load_ranks(tmp_path, ranks):
        pass
    assert str(caught.value) == message
