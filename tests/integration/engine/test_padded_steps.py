"""Steps that are padded as CUDA graphs are: the same answers, whatever a batch asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, SamplingParams, StructuredOutputs
from pagewire.shared.engine.offline.outputs import RequestOutput
from pagewire.tests.support.hf_greedy import greedy
from pagewire.tests.support.padded_steps import run_padded
from pagewire.tests.support.tiny_models import VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

FORM = StructuredOutputs(regex=r"[A-Z][a-z]{4,9}( [a-z]{2,6}){2}")
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "n": 3, "logprobs": 2},
    {"structured_outputs": FORM},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 1, "logprobs_mode": "processed"},
    {"temperature": 0.9, "prompt_logprobs": 1, "bad_words": ["the", "import this"]},
    {"temperature": 1.0, "min_tokens": 6, "ignore_eos": False},
    {"temperature": 0.0, "max_tokens": 1, "logprobs": 0},
    {"temperature": 0.8, "structured_outputs": FORM, "frequency_penalty": 1.9},
]
PARAMS = [
    SamplingParams(**({"seed": seed, "max_tokens": 20, "ignore_eos": True} | fields))
    for seed, fields in enumerate(ASKED * 3)
]
# Each begins with those before it, so that prefixes are cached.
PROMPTS = [[n * 37 % 1000 + 10 for n in range(1 + 8 * i)] for i in range(len(PARAMS))]


def make_llm(**settings: Any) -> LLM:
    return LLM("demo", device="cpu", dtype="float32", max_model_len=256, **settings)


@pytest.fixture(scope="module")
def alone(one_thread: None) -> list[RequestOutput]:
    llm = make_llm(enable_prefix_caching=False)
    return [
        llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def numbers(output: RequestOutput) -> list[float]:
    """All log probabilities of an output."""
    positions = [each for answer in output.outputs for each in answer.logprobs or []]
    positions += [each for each in output.prompt_logprobs or [] if each is not None]
    return [found.logprob for position in positions for found in position.values()]


@pytest.mark.parametrize(
    ("settings", "mask_wait_s"),
    [
        ({"max_num_seqs": 1, "max_num_batched_tokens": 64}, 1.0),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 33}, 0.0),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 96}, 1.0),
        ({"max_num_seqs": 9}, 0.0),
        ({"max_num_seqs": 30, "max_num_batched_tokens": 200, "num_blocks": 40}, 0.0),
    ],
    ids=["one", "three-late-masks", "eight", "nine-late-masks", "preempted-late-masks"],
)
def test_answers_do_not_depend_on_the_padding(
    alone: list[RequestOutput], settings: dict[str, Any], mask_wait_s: float
) -> None:
    llm = make_llm(**settings)
    core = llm.core
    core.overlap = True
    core.constraints.mask_wait_s = (mask_wait_s, mask_wait_s)
    run_padded(llm.engine.runner, 128)
    for got, want in zip(llm.generate(PROMPTS, PARAMS), alone, strict=True):
        assert [each.token_ids for each in got.outputs] == [each.token_ids for each in want.outputs]
        assert numbers(got) == pytest.approx(numbers(want), abs=1e-3)
    assert (core.scheduler.table.num_preemptions > 0) == ("num_blocks" in settings)
    assert core.stats.rows_skipped > 0 or mask_wait_s > 0
    core.scheduler.table.check_integrity()


@pytest.mark.parametrize(
    ("family", "shape"), [("gptoss", "windows-by-layer"), ("qwen2moe", "some-dense-layers")]
)
def test_experts_of_padding_rows_change_nothing(tmp_path: Path, family: str, shape: str) -> None:
    theirs = write_tiny_model(tmp_path, family, shape)
    prompts = [[(n * step + step) % VOCAB for n in range(7 * step)] for step in (1, 3, 5, 7, 11)]
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=40)
    run_padded(llm.engine.runner, 64)
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for output, prompt in zip(llm.generate(prompts, asked), prompts, strict=True):
        assert output.token_ids == greedy(theirs, prompt, 12)
