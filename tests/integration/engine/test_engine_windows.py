"""Engines over models with sliding windows or latent vectors: tokens, and blocks given up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, SamplingParams
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.hf_greedy import greedy
from pagewire.tests.support.padded_steps import run_padded
from pagewire.tests.support.tiny_models import VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
ANSWER = 60
PROMPTS = [[(n * step + step) % VOCAB for n in range(length)] for step, length in
           ((5, 3), (7, 31), (11, 80), (13, 140))]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
# A window in some layers, and in all of them; and one vector a token. With so few blocks that not
# all prompts are answered at once.
SHAPES: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "some": (
        "qwen3",
        "windows-by-layer",
        {"num_hidden_layers": 4, "layer_types": LAYERS, "sliding_window": 21},
        60,
    ),
    "all": ("mistral", "window-groups-of-2", {"sliding_window": 24, "head_dim": 24}, 16),
    "latent": ("deepseekv2", "query-latents-biases", {"hidden_size": 64}, 20),
}


@dataclass(frozen=True)
class Tried:
    path: Path
    expected: list[list[int]]
    few_blocks: int

    def llm(self, **settings: Any) -> LLM:
        return LLM(str(self.path), device="cpu", dtype="float32", block_size=BLOCK_SIZE, **settings)


@pytest.fixture(scope="module", params=SHAPES)
def tried(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Tried:
    family, shape, changes, few_blocks = SHAPES[request.param]
    path = tmp_path_factory.mktemp("model")
    theirs = write_tiny_model(path, family, shape, **changes)
    return Tried(path, [greedy(theirs, prompt, ANSWER) for prompt in PROMPTS], few_blocks)


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 13, "max_num_seqs": 4},
        {"enable_prefix_caching": False},
    ],
    ids=["whole", "chunks", "uncached"],
)
@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_tokens_are_hugging_faces(tried: Tried, settings: dict[str, Any], overlap: bool) -> None:
    llm = tried.llm(**settings)
    llm.core.overlap = overlap
    assert tokens_of(llm, PROMPTS, GREEDY) == tried.expected
    assert llm.block_counts().used == 0
    llm.core.scheduler.table.check_integrity()


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_preempted_answers_are_computed_again(tried: Tried, overlap: bool) -> None:
    llm = tried.llm(num_blocks=tried.few_blocks, max_model_len=208, max_num_batched_tokens=16)
    llm.core.overlap = overlap
    assert tokens_of(llm, PROMPTS * 2, GREEDY) == tried.expected * 2
    assert llm.core.scheduler.table.num_preemptions > 0
    llm.core.scheduler.table.check_integrity()


def test_padded_steps_have_the_same_tokens(tried: Tried) -> None:
    llm = tried.llm(max_num_seqs=8)
    run_padded(llm.engine.runner)
    assert tokens_of(llm, PROMPTS, GREEDY) == tried.expected


def test_tritons_kernels_have_the_same_tokens(tried: Tried) -> None:
    llm = tried.llm(kernels="triton", max_num_seqs=2)
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert tokens_of(llm, PROMPTS[:2], few) == [tokens[:3] for tokens in tried.expected[:2]]


def test_a_prefix_is_taken_up_again_where_its_window_is_cached(tried: Tried) -> None:
    llm = tried.llm()
    prompt, answer = PROMPTS[3], tried.expected[3]
    assert tokens_of(llm, [prompt], GREEDY) == [answer]
    [again] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert again.token_ids == answer and again.cached_tokens == 128
    begun = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert tokens_of(llm, [prompt], begun) == [answer[:40]]
    rest = SamplingParams(temperature=0, max_tokens=ANSWER - 40, ignore_eos=True)
    [more] = llm.generate([prompt + answer[:40]], rest, use_tqdm=False)
    assert more.token_ids == answer[40:]
    assert more.cached_tokens == 176  # of 180, in whole blocks


def test_answers_to_one_prompt_fork(tried: Tried) -> None:
    llm = tried.llm()
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, n=3)
    for prompt, expected in zip(PROMPTS, tried.expected, strict=True):
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert [each.token_ids for each in output.outputs] == [expected] * 3


def test_blocks_before_the_window_are_given_up(tried: Tried) -> None:
    llm, most = tried.llm(max_num_batched_tokens=32), 0
    spec = RequestSpec(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    sequence = new_sequence("a", PROMPTS[3], spec, ())
    llm.core.sequences.add(sequence)
    while not sequence.is_finished:
        most = max(most, llm.block_counts().used)
        llm.core.step()
    assert sequence.token_ids[len(PROMPTS[3]) :] == tried.expected[3]
    layout, length = llm.core.scheduler.pool.layout, len(PROMPTS[3]) + ANSWER
    assert most <= layout.most_blocks(length, 32)
    if layout.has_windows:
        assert most < len(layout.groups) * layout.blocks_for(length)
