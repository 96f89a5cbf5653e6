"""Shaped sampling in the engine: Hugging Face's tokens, and the same whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from pagewire import LLM, SamplingParams
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.sampling import RequestSpec, SamplingDefaults
from pagewire.tests.support.padded_steps import run_padded
from pagewire.tests.support.shaped_requests import SHAPES, shaped_fields

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS = 40
COUNT = 2 * len(SHAPES)
PROMPTS = [[n * 37 % 1000 + 10 + i for n in range(8 + 11 * i)] for i in range(COUNT)]


def make_llm(*, overlap: bool = True, **settings: Any) -> LLM:
    llm = LLM("demo", device="cpu", dtype="float32", **settings)
    llm.core.overlap = overlap
    return llm


@pytest.fixture(scope="module")
def llm(one_thread: None) -> LLM:
    return make_llm(enable_prefix_caching=False)


def params_of(index: int, **more: Any) -> SamplingParams:
    return SamplingParams(**shaped_fields(index), max_tokens=MAX_TOKENS, **more)


def spec_of(llm: LLM, index: int) -> RequestSpec:
    assert llm.tokenizer is not None
    asked = params_of(index)
    return asked.resolve(SamplingDefaults(), MAX_TOKENS, llm.tokenizer.encode_word)


# Against Hugging Face


@pytest.fixture(scope="module")
def model(one_thread: None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


class OutputPenalties(LogitsProcessor):
    """Frequency and presence penalties as OpenAI defines them; Hugging Face has none."""

    def __init__(self, start: int, frequency: float, presence: float) -> None:
        self.start, self.frequency, self.presence = start, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.start :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


class OfOutput(LogitsProcessor):
    """Applies a processor that knows no prompt."""

    def __init__(self, start: int, processor: LogitsProcessor) -> None:
        self.start, self.processor = start, processor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.processor(input_ids[:, self.start :], scores)


def bias_of(biases: dict[int, float]) -> LogitsProcessor:
    return SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])


BIASES = {40: 7.5, 300: 9.0, 17: -100.0, 77: 6.25, 264: 2.0}
WORDS = [[40], [16, 300], [11, 12, 13]]
Processors = Callable[[int], list[LogitsProcessor]]
HF_CASES: dict[str, tuple[dict[str, Any], Processors]] = {
    "repetition": (
        {"repetition_penalty": 1.4},
        lambda _start: [RepetitionPenaltyLogitsProcessor(1.4)],
    ),
    "frequency-presence": (
        {"frequency_penalty": 1.6, "presence_penalty": 1.8},
        lambda start: [OutputPenalties(start, 1.6, 1.8)],
    ),
    "bias": ({"logit_bias": BIASES}, lambda _start: [bias_of(BIASES)]),
    "order": (
        {
            "logit_bias": BIASES,
            "repetition_penalty": 1.4,
            "frequency_penalty": 1.6,
            "presence_penalty": 1.8,
        },
        lambda start: [
            bias_of(BIASES),
            RepetitionPenaltyLogitsProcessor(1.4),
            OutputPenalties(start, 1.6, 1.8),
        ],
    ),
}


def generate(model: Any, prompt: list[int], processors: list[LogitsProcessor]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        pad_token_id=0,
        logits_processor=LogitsProcessorList(processors),
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize(("fields", "processors"), HF_CASES.values(), ids=HF_CASES)
def test_greedy_tokens_are_those_of_hugging_faces_processors(
    llm: LLM, model: Any, fields: dict[str, Any], processors: Processors
) -> None:
    chosen = PROMPTS[:8]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **fields)
    got = [output.token_ids for output in llm.generate(chosen, params)]
    expected = [generate(model, prompt, processors(len(prompt))) for prompt in chosen]
    assert got == expected
    plain = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert got != [output.token_ids for output in llm.generate(chosen, plain)]


def run_specs(llm: LLM, specs: list[RequestSpec], prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of requests as the engine has them."""
    core, eos = llm.core, llm.engine.config.eos_token_ids
    sequences = [
        new_sequence(f"s{index}", prompt, spec, eos)
        for index, (prompt, spec) in enumerate(zip(prompts, specs, strict=True))
    ]
    for sequence in sequences:
        core.sequences.add(sequence)
    return finished(llm, sequences)


def finished(llm: LLM, sequences: list[Sequence]) -> list[list[int]]:
    core = llm.core
    while core.has_work:
        core.step()
    core.scheduler.table.check_integrity()
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]


def test_bad_words_are_hugging_faces_over_the_output(llm: LLM, model: Any) -> None:
    plain = RequestSpec(temperature=0, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    free = run_specs(llm, [plain], PROMPTS[3:4])[0]
    words = [free[3:5], free[10:13], [free[20]], [5, *free[:2]]]
    spec = RequestSpec(
        temperature=0, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True,
        bad_words=tuple(map(tuple, words)),
    )  # fmt: skip
    start = len(PROMPTS[3])
    # With at least one token: Hugging Face's processor takes no empty input.
    expected = (
        free[:1]
        + generate(
            model, PROMPTS[3] + free[:1], [OfOutput(start, NoBadWordsLogitsProcessor(words))]
        )[:-1]
    )
    got = run_specs(llm, [spec], PROMPTS[3:4])[0]
    assert got == expected != free
    assert free[20] not in got


def test_no_stop_token_comes_before_min_tokens(llm: LLM, model: Any) -> None:
    prompt = PROMPTS[2]
    plain = RequestSpec(temperature=0, seed=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    free = run_specs(llm, [plain], [prompt])[0]
    stops, ends = {free[2], free[6]}, set(llm.engine.config.eos_token_ids)
    for least in (0, 1, 4, 12, MAX_TOKENS):
        spec = RequestSpec(
            temperature=0, seed=0, max_tokens=MAX_TOKENS, min_tokens=least,
            stop_token_ids=tuple(stops),
        )  # fmt: skip
        processor = MinLengthLogitsProcessor(len(prompt) + least, sorted(stops | ends))
        expected = generate(model, prompt, [processor])
        end = next((i for i, t in enumerate(expected) if t in stops | ends), MAX_TOKENS)
        got = run_specs(llm, [spec], [prompt])[0]
        assert got == expected[: end + 1]
        assert len(got) >= least


def test_only_allowed_tokens_come(llm: LLM) -> None:
    allowed = list(range(100, 140))
    params = SamplingParams(allowed_token_ids=allowed, temperature=6.0, seed=1, max_tokens=60)
    (output,) = llm.generate([PROMPTS[0]], params)
    assert set(output.token_ids) <= set(allowed)
    assert len(set(output.token_ids)) > 10


def test_log_probabilities_stay_those_of_the_raw_logits(llm: LLM) -> None:
    """Those of a token that is forced included."""
    free = llm.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=1, logprobs=5))[0]
    forced = SamplingParams(temperature=0, max_tokens=1, logprobs=5, allowed_token_ids=[777])
    (output,) = llm.generate([PROMPTS[1]], forced)
    assert output.token_ids == [777]
    assert output.outputs[0].logprobs is not None and free.outputs[0].logprobs is not None
    found, expected = dict(output.outputs[0].logprobs[0]), free.outputs[0].logprobs[0]
    own = found.pop(777)
    assert own.rank > 5 and own.logprob < min(each.logprob for each in expected.values())
    assert {i: (p.logprob, p.rank) for i, p in found.items()} == {
        i: (p.logprob, p.rank) for i, p in expected.items()
    }


# The same tokens, whatever happens


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [
        llm.generate([prompt], params_of(index))[0].token_ids
        for index, prompt in enumerate(PROMPTS)
    ]


def together(llm: LLM) -> list[list[int]]:
    params = [params_of(index) for index in range(COUNT)]
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


def test_most_of_these_requests_get_other_tokens_than_plain_ones(
    llm: LLM, alone: list[list[int]]
) -> None:
    changed = set()
    for index, (prompt, tokens) in enumerate(zip(PROMPTS, alone, strict=True)):
        fields = shaped_fields(index)
        kept = {name: fields[name] for name in ("temperature", "seed") if name in fields}
        plain = llm.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS, **kept))[0]
        if plain.token_ids != tokens:
            changed.add(index // 2)
    assert changed >= set(range(len(SHAPES))) - {3, 4}  # nothing; min_tokens, on which few end
    assert 3 not in changed


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": False},
        {"max_num_seqs": 3, "max_num_batched_tokens": 37},
        {"max_num_batched_tokens": 48, "num_blocks": 24, "max_model_len": 300},
    ],
    ids=["batch", "one-after-the-other", "chunks", "preempted"],
)
def test_shaped_tokens_do_not_depend_on_the_company(
    alone: list[list[int]], settings: dict[str, Any]
) -> None:
    batch = make_llm(**settings)
    assert together(batch) == alone
    assert together(batch) == alone  # device slots, and cached prefixes, that others had before
    assert (batch.core.scheduler.table.num_preemptions > 0) == ("num_blocks" in settings)


def test_padded_steps_give_the_same_tokens(alone: list[list[int]]) -> None:
    batch = make_llm(max_num_seqs=12)
    run_padded(batch.engine.runner)
    assert together(batch) == alone


def test_two_ranks_give_the_same_tokens(alone: list[list[int]]) -> None:
    assert together(make_llm(num_blocks=40, max_model_len=300, tensor_parallel_size=2)) == alone


def test_children_get_what_they_get_alone(llm: LLM) -> None:
    for index in range(0, COUNT, 2):
        asked = params_of(index, n=3)
        outputs = llm.generate([PROMPTS[5]], asked)[0].outputs
        spec = spec_of(llm, index)
        for choice, output in enumerate(outputs):
            expected = run_specs(llm, [spec.for_choice(choice)], [PROMPTS[5]])[0]
            assert output.token_ids == expected


@pytest.mark.parametrize("given", [1, 7, 25])
def test_an_interrupted_answer_goes_on_with_the_same_tokens(
    llm: LLM, alone: list[list[int]], given: int
) -> None:
    """As after a migration: another engine gets the prompt and the output so far."""
    core, eos = llm.core, llm.engine.config.eos_token_ids
    rest = {}
    for index, (prompt, tokens) in enumerate(zip(PROMPTS, alone, strict=True)):
        if len(tokens) > given:
            spec, output = spec_of(llm, index), tokens[:given]
            rest[index] = new_sequence(f"m{index}", prompt, spec, eos, output)
            core.sequences.add(rest[index])
    assert len(rest) > COUNT // 2
    assert finished(llm, list(rest.values())) == [alone[index] for index in rest]


@pytest.mark.parametrize("given", [0, 3])
def test_first_tokens_of_prefill_workers_are_the_same(alone: list[list[int]], given: int) -> None:
    """One engine computes prompt and first token, another one goes on from there."""
    here, there = make_llm(), make_llm()
    eos = here.engine.config.eos_token_ids
    for index, (prompt, tokens) in enumerate(zip(PROMPTS, alone, strict=True)):
        if len(tokens) <= given + 2:
            continue
        spec = spec_of(here, index)
        job = new_sequence(f"j{index}", prompt + tokens[:given], spec, eos)
        job.output_start, job.prefill_only = len(prompt), True
        there.core.sequences.add(job)
        first = finished(there, [job])[0]
        assert first == [tokens[given]]
        blocks = list(job.tables[0].block_ids)  # kept until they are sent
        sequence = new_sequence(f"d{index}", prompt, spec, eos, tokens[:given])
        sequence.remote_prefill = True
        here.core.sequences.add(sequence)
        while sequence.status is not RequestStatus.RESERVED:
            here.core.step()
        # Its blocks come from the other engine.
        pool = there.engine.runner.kv_pool
        here.engine.runner.kv_pool[sequence.tables[0].block_ids[: len(blocks)]] = pool[blocks]
        there.core.sequences.abort(job.request_id)
        here.core.sequences.activate(sequence, first[0])
        assert finished(here, [sequence]) == [tokens]
