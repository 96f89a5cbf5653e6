"""The engine's tokens against Hugging Face's, however requests are cut, mixed and preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.execution.step_inputs import HostStep, StepInputs, StepShape
from pagewire.shared.engine.offline.outputs import RequestOutput
from pagewire.shared.model.demo import demo_model_path
from pagewire.tests.support.masked_steps import ALLOWED, run_masked_steps
from pagewire.tests.support.padded_steps import run_padded
from pagewire.tools.demo_model.prompts import standard_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 64
BLOCK_SIZE = 16
EACH_EXECUTOR = pytest.mark.parametrize("ranks", [1, 2], ids=["one-rank", "two-ranks"])
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def make_llm(*, overlap: bool = False, ranks: int = 1, **settings: Any) -> LLM:
    settings["tensor_parallel_size"] = ranks
    llm = LLM("demo", device="cpu", dtype="float32", **settings)
    llm.core.overlap = overlap
    return llm


@pytest.fixture(scope="module")
def shared_llm(one_thread: None) -> LLM:
    return make_llm(enable_prefix_caching=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def assert_equal(got: list[list[int]], want: list[list[int]]) -> None:
    different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    assert not different, f"prompts {different} of {len(want)}"


def assert_idle(llm: LLM) -> None:
    scheduler = llm.core.scheduler
    scheduler.table.check_integrity()
    assert llm.block_counts().used == 0
    assert not llm.core.has_work


@dataclass(frozen=True)
class Truth:
    """Prompts and the tokens that Hugging Face generates after them."""

    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def truth(one_thread: None) -> Truth:
    tokenizer = LLM("demo", device="cpu").tokenizer
    assert tokenizer is not None
    standard = standard_prompts(tokenizer)
    prompts = [standard[0], *standard[1::2]]
    assert len(prompts[0]) == 1 and max(map(len, prompts)) == 1500
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    # Go on past the end of the sequence. `min_new_tokens` would not: it rules that token out.
    model.generation_config.eos_token_id = None
    tokens = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        tokens.append(output[0, len(prompt) :].tolist())
    return Truth(prompts, tokens)


ROOMY = {"num_blocks": 2000}  # everything fits at once
TIGHT = {"num_blocks": 98}  # the longest sequence fits, with room for little else
CASES = {
    "roomy": ROOMY,
    "roomy-overlap": {**ROOMY, "overlap": True},
    "three-at-once-chunk-64-overlap": {
        **ROOMY,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "overlap": True,
    },
    "tight": TIGHT,
    "tight-chunk-7-overlap": {**TIGHT, "max_num_batched_tokens": 7, "overlap": True},
    "tight-chunk-64": {**TIGHT, "max_num_batched_tokens": 64},
    "tight-chunk-100-uncached": {
        **TIGHT,
        "max_num_batched_tokens": 100,
        "enable_prefix_caching": False,
    },
    "tight-chunk-100-blocks-of-32-overlap": {
        "num_blocks": 49,
        "block_size": 32,
        "max_num_batched_tokens": 100,
        "overlap": True,
    },
}


# Over two ranks run those that differ most: each costs as much again.
RANKED = ("roomy-overlap", "tight-chunk-64", "tight-chunk-100-blocks-of-32-overlap")
# Each of their settings is in another case, too.
EXHAUSTIVE = {
    ("roomy", 1),
    ("tight", 1),
    ("tight-chunk-100-blocks-of-32-overlap", 1),
    ("roomy-overlap", 2),
    ("tight-chunk-64", 2),
}


def case(name: str, ranks: int) -> Any:
    marks = [pytest.mark.exhaustive] if (name, ranks) in EXHAUSTIVE else []
    return pytest.param(CASES[name], ranks, id=f"{name}-{ranks}", marks=marks)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [*(case(name, 1) for name in CASES), *(case(name, 2) for name in RANKED)],
)
def test_greedy_tokens_equal_hugging_faces(
    truth: Truth, settings: dict[str, Any], ranks: int
) -> None:
    llm = make_llm(ranks=ranks, **settings)
    outputs = llm.generate(truth.prompts, GREEDY)
    assert_equal(tokens_of(outputs), truth.tokens)
    assert {output.finish_reason for output in outputs} == {"length"}
    preempted = llm.core.scheduler.table.num_preemptions > 0
    assert preempted == (settings["num_blocks"] < ROOMY["num_blocks"])
    assert_idle(llm)


@EACH_EXECUTOR
def test_generation_ends_after_the_end_of_sequence(truth: Truth, ranks: int) -> None:
    llm = make_llm(ranks=ranks, overlap=True)
    ends = set(llm.engine.config.eos_token_ids)
    expected = []
    for tokens in truth.tokens:
        at = next((i for i, token in enumerate(tokens) if token in ends), MAX_TOKENS)
        expected.append(tokens[: at + 1])
    outputs = llm.generate(truth.prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    assert_equal(tokens_of(outputs), expected)
    reasons = ["stop" if tokens[-1] in ends else "length" for tokens in expected]
    assert [output.finish_reason for output in outputs] == reasons
    assert set(reasons) == {"stop", "length"}
    assert_idle(llm)


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 64])
def test_padded_steps_give_the_same_tokens(truth: Truth, max_num_batched_tokens: int) -> None:
    llm = make_llm(overlap=True, max_num_batched_tokens=max_num_batched_tokens)
    runner = llm.engine.runner
    run_padded(runner, max_num_batched_tokens)
    assert_equal(tokens_of(llm.generate(truth.prompts, GREEDY)), truth.tokens)
    assert runner.state.position[runner.state.padding_slot] == 0


def test_padded_steps_take_their_masks_when_they_come() -> None:
    launched = run_masked_steps(make_llm(max_num_seqs=8).engine.runner)
    assert [launched[1][row] for row in ALLOWED] == list(ALLOWED.values())
    assert launched[1][1] not in ALLOWED.values()
    padded = make_llm(max_num_seqs=8).engine.runner
    run_padded(padded)
    assert run_masked_steps(padded) == launched


def test_rows_that_are_all_held_go_on_in_a_later_step() -> None:
    launched = run_masked_steps(make_llm(max_num_seqs=8).engine.runner)
    assert run_masked_steps(make_llm(max_num_seqs=8).engine.runner, holds=True) == launched


@pytest.mark.parametrize("with_chunks", [False, True])
def test_padding_rows_never_run_out_of_positions(with_chunks: bool) -> None:
    llm = make_llm(max_model_len=32)
    runner, state = llm.engine.runner, llm.engine.runner.state
    shape, slot = StepShape(3, 16, 2), state.padding_slot
    empty = HostStep([], [], runner.block_size, state.host_tables)
    inputs = StepInputs.build_padded(empty, shape, slot)
    with torch.inference_mode():
        for _ in range(40):
            rows = runner.run_chunks(inputs) if with_chunks else runner.decode(inputs.decode_slots)
            runner.sampling.sample(rows, shaped=False)
    assert state.position[slot] == 0


# Seeded sampling: a function of prompt, parameters, seed and position alone

VARIANTS: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.95, "top_k": 50}]


@pytest.fixture(scope="module")
def short_prompts(truth: Truth) -> list[list[int]]:
    return [prompt for prompt in truth.prompts if len(prompt) < 300][:16]


def seeded(count: int) -> list[SamplingParams]:
    """Parameters of all variants in turn, each with a seed of its own."""
    return [
        SamplingParams(
            temperature=0.8,
            seed=1000 + i,
            max_tokens=32,
            ignore_eos=True,
            **VARIANTS[i % len(VARIANTS)],
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(short_prompts: list[list[int]]) -> list[list[int]]:
    llm = make_llm(enable_prefix_caching=False)
    params = seeded(len(short_prompts))
    return [
        llm.generate([prompt], sampling)[0].token_ids
        for prompt, sampling in zip(short_prompts, params, strict=True)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": True},
        {"overlap": True, "max_num_batched_tokens": 37},
        {"overlap": True, "max_num_batched_tokens": 48, "num_blocks": 30},
    ],
    ids=["batch", "overlap", "chunks", "preempted"],
)
@EACH_EXECUTOR
def test_seeded_tokens_do_not_depend_on_the_company(
    short_prompts: list[list[int]],
    alone: list[list[int]],
    settings: dict[str, Any],
    ranks: int,
) -> None:
    llm = make_llm(ranks=ranks, **settings)
    assert len(short_prompts) == 16
    assert_equal(tokens_of(llm.generate(short_prompts, seeded(16))), alone)
    preempted = llm.core.scheduler.table.num_preemptions > 0
    assert preempted == ("num_blocks" in settings)
    assert_idle(llm)


def test_another_seed_gives_other_tokens(truth: Truth) -> None:
    prompt, seeds = truth.prompts[8], (1, 2, 1)
    params = [SamplingParams(temperature=2.0, seed=seed, max_tokens=32) for seed in seeds]
    first, other, again = tokens_of(make_llm().generate([prompt] * 3, params))
    assert first == again != other


# What `LLM.generate` takes


@pytest.mark.parametrize(
    ("prompts", "params", "param"),
    [
        ([[1, 2], 3], None, "prompts"),
        ([1, [2]], None, "prompts"),
        ([[1], [1, -1]], None, "prompts"),
        ([[1], [1, 10**6]], None, "prompts"),
        ([[1], ["a"]], None, "prompts"),
        ([[1], []], None, "prompt"),
        ([[1], [1] * 4096], None, "prompt"),
        ([[1]], SamplingParams(allowed_token_ids=[10**6]), "allowed_token_ids"),
        ([[1]], [GREEDY, GREEDY], "sampling_params"),
    ],
    ids=[
        "list-then-token",
        "token-then-list",
        "negative",
        "outside-vocabulary",
        "not-a-number",
        "empty",
        "too-long",
        "bad-parameter",
        "too-many-parameters",
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    shared_llm: LLM, prompts: Any, params: Any, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        shared_llm.generate(prompts, params)
    assert caught.value.param == param
    assert_idle(shared_llm)


def test_one_prompt_may_come_without_a_list(shared_llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=5)
    assert shared_llm.tokenizer is not None
    text = "The import statement"
    tokens = shared_llm.tokenizer.encode(text)
    one = shared_llm.generate(text, sampling)
    assert one == shared_llm.generate([text], sampling)
    assert one[0].outputs == shared_llm.generate(tokens, sampling)[0].outputs
    assert one[0].text == shared_llm.tokenizer.decode(one[0].token_ids)
    assert shared_llm.generate([], sampling) == []


# The prefix cache


@EACH_EXECUTOR
def test_same_prompts_again_are_cached_but_for_their_tails(truth: Truth, ranks: int) -> None:
    llm = make_llm(ranks=ranks, **ROOMY, overlap=True)
    prompts = truth.prompts[::4]
    first, again = ([llm.generate([prompt], GREEDY)[0] for prompt in prompts] for _ in range(2))
    assert_equal(tokens_of(first), truth.tokens[::4])
    assert_equal(tokens_of(again), truth.tokens[::4])
    assert [output.cached_tokens for output in again] == [
        (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts
    ]


def test_prompts_of_one_beginning_share_its_blocks(truth: Truth) -> None:
    llm = make_llm(**ROOMY)
    prompt = max(truth.prompts, key=len)
    variants = [prompt[:700] + prompt[700 + n :] for n in (0, 1, 5)]
    outputs = [llm.generate([variant], GREEDY)[0] for variant in variants]
    assert [output.cached_tokens for output in outputs] == [0, 688, 688]
    uncached = make_llm(enable_prefix_caching=False)
    assert_equal(tokens_of(outputs), tokens_of(uncached.generate(variants, GREEDY)))


def test_without_caching_nothing_is_cached(truth: Truth) -> None:
    llm = make_llm(enable_prefix_caching=False)
    outputs = [llm.generate([truth.prompts[8]], GREEDY)[0] for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 0]
    assert llm.block_counts().cached == 0
