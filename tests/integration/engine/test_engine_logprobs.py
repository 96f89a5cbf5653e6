"""The engine's log probabilities against Hugging Face's, however requests are cut and mixed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from pagewire import LLM, SamplingParams
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.execution import scoring
from pagewire.shared.engine.offline.outputs import RequestOutput
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.engine.scheduling.step import (
    GrammarMasks,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    TableEntries,
)
from pagewire.shared.engine.step_output import StepOutput
from pagewire.shared.request.logprobs import MAX_POSITIONS
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.logprob_truth import TOLERANCE, LogprobTruth

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[(n * 37 + length) % 1900 + 10 for n in range(length)] for length in (1, 2, 17, 60, 140)]
ASKED = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.9, top_k=5, seed=6, max_tokens=40, logprobs=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=7, max_tokens=40, ignore_eos=True, prompt_logprobs=0),
]


@pytest.fixture(scope="module")
def truth(one_thread: None) -> LogprobTruth:
    return LogprobTruth()


def make_llm(*, overlap: bool = True, **settings: Any) -> LLM:
    llm = LLM("demo", device="cpu", dtype="float32", **settings)
    llm.core.overlap = overlap
    return llm


def plain(found: Any) -> list[dict[int, float] | None]:
    return [by_id and {token: each.logprob for token, each in by_id.items()} for by_id in found]


def check(truth: LogprobTruth, output: RequestOutput, asked: SamplingParams) -> None:
    prompt, answer = output.prompt_token_ids, output.outputs[0]
    assert (answer.logprobs is None) == (asked.logprobs is None)
    if asked.logprobs is not None:
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        truth.check(prompt, answer.token_ids, plain(answer.logprobs), asked.logprobs)
    assert (output.prompt_logprobs is None) == (asked.prompt_logprobs is None)
    if asked.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        truth.check(prompt, [], plain(output.prompt_logprobs), asked.prompt_logprobs)


CASES: dict[str, dict[str, Any]] = {
    "roomy": {"overlap": False},
    "roomy-overlap": {},
    "chunks-of-7": {"max_num_batched_tokens": 7},
    "chunks-of-64": {"max_num_batched_tokens": 64, "overlap": False},
    "preempted": {"num_blocks": 12, "max_num_batched_tokens": 40, "max_model_len": 192},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_log_probabilities_equal_hugging_faces(
    truth: LogprobTruth, settings: dict[str, Any]
) -> None:
    llm = make_llm(**settings)
    asked = [ASKED[(i + shift) % 5] for shift in (0, 1, 4) for i in range(5)]
    outputs = llm.generate(PROMPTS * 3, asked)
    for output, params in zip(outputs, asked, strict=True):
        check(truth, output, params)
    assert (llm.core.scheduler.table.num_preemptions > 0) == ("num_blocks" in settings)
    llm.core.scheduler.table.check_integrity()
    assert llm.block_counts().used == 0


def test_tokens_are_the_same_whether_anybody_asks_or_not() -> None:
    silent = [msgspec.structs.replace(each, logprobs=None, prompt_logprobs=None) for each in ASKED]
    asked, unasked = (make_llm().generate(PROMPTS, each) for each in (ASKED, silent))
    assert [a.token_ids for a in asked] == [b.token_ids for b in unasked]


def test_two_ranks_give_the_same(truth: LogprobTruth) -> None:
    outputs = make_llm(tensor_parallel_size=2).generate(PROMPTS, ASKED)
    for output, params in zip(outputs, ASKED, strict=True):
        check(truth, output, params)


def test_a_cached_prompt_is_computed_again_and_stays_cached(truth: LogprobTruth) -> None:
    llm = make_llm()
    silent = SamplingParams(temperature=0, max_tokens=4)
    llm.generate([PROMPTS[4]], silent)
    output = llm.generate([PROMPTS[4]], ASKED[0])[0]
    assert output.cached_tokens == 0
    check(truth, output, ASKED[0])
    assert llm.generate([PROMPTS[4]], silent)[0].cached_tokens == 128
    fresh = make_llm()
    fresh.generate([PROMPTS[4]], ASKED[0])  # publishes its blocks as every prompt does
    assert fresh.generate([PROMPTS[4]], silent)[0].cached_tokens == 128


def test_the_most_likely_token_has_rank_one() -> None:
    output = make_llm().generate([PROMPTS[3]], ASKED[0])[0]
    assert output.outputs[0].logprobs is not None
    for token, by_id in zip(output.token_ids, output.outputs[0].logprobs, strict=True):
        assert next(iter(by_id)) == token
        assert [each.rank for each in by_id.values()] == [1, 2, 3]
        assert all(each.decoded_token is not None for each in by_id.values())


def test_a_stop_string_cuts_the_log_probabilities_with_the_tokens() -> None:
    llm = make_llm()
    text = "Lambda expressions"
    free = llm.generate(text, SamplingParams(temperature=0, max_tokens=20))[0]
    stop = free.text[10:14]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, stop=stop)
    answer = llm.generate(text, params)[0].outputs[0]
    assert answer.finish_reason == "stop" and len(answer.token_ids) < 20
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)


def test_masked_tokens_have_the_log_probabilities_of_the_raw_logits(truth: LogprobTruth) -> None:
    runner = make_llm().engine.runner
    prompt = PROMPTS[2][:12]
    slots = [NewDeviceSlot(slot, RequestSpec(temperature=0, seed=0, logprobs=2)) for slot in (0, 1)]
    plan = StepPlan(
        number=1,
        new_slots=slots,
        blocks=TableEntries([0, 1], [0, 0], [3, 5]),
        chunks=[PrefillChunk(slot, 0, prompt, samples=True) for slot in (0, 1)],
        awaits_masks=True,
    )
    pending = runner.execute(plan)
    mask = bytearray(2048 // 8)
    mask[77 // 8] |= 1 << 77 % 8
    runner.sample(GrammarMasks(number=1, masks={1: bytes(mask)}))
    result = pending.wait()
    assert result.tokens[1] == 77 and result.scores is not None
    row = truth.of(prompt)[-1]
    for index, token in enumerate(result.tokens):
        (scored,) = result.scores.tokens[index]
        assert scored.id == token
        assert abs(scored.logprob - row[token].item()) <= TOLERANCE
        assert [each for each, _ in scored.top] == row.topk(2).indices.tolist()


def step_all(llm: LLM) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while llm.core.has_work:
        outputs += llm.core.step()[0]
    return outputs


def test_a_long_prompt_comes_in_bounded_parts_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    runner = llm.engine.runner
    rows: list[int] = []
    compute = type(runner.model).compute_logits

    def counting(self: Any, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows.append(len(hidden))
        return compute(self, hidden, out)

    monkeypatch.setattr(type(runner.model), "compute_logits", counting)
    prompt = [n * 7 % 1900 + 10 for n in range(1500)]
    params = RequestSpec(temperature=0, max_tokens=2, seed=0, logprobs=1, prompt_logprobs=20)
    llm.core.sequences.add(new_sequence("long", prompt, params, ()))
    outputs = step_all(llm)
    parts = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert [part.start for part in parts] == [1, 513, 1025]
    assert max(len(part.tokens) for part in parts) == MAX_POSITIONS
    assert [token.id for part in parts for token in part.tokens] == prompt[1:]
    assert all(len(msgspec.msgpack.encode(part)) < 100_000 for part in parts)
    first = next(i for i, output in enumerate(outputs) if output.token_ids)
    assert all(output.prompt_logprobs is None for output in outputs[first:])
    assert max(rows) == scoring.TILE_ROWS


def test_a_batch_in_which_nobody_asks_computes_no_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make_llm()
    launched = []
    for name in ("score_tokens", "score_prompt"):
        method = getattr(scoring.Scoring, name)

        def counted(self: Any, *args: Any, method: Any = method) -> None:
            launched.append(args)
            method(self, *args)

        monkeypatch.setattr(scoring.Scoring, name, counted)
    silent = SamplingParams(temperature=0, max_tokens=4)
    llm.generate(PROMPTS, ASKED)
    assert launched
    launched.clear()
    llm.generate(PROMPTS, silent)  # in device slots whose owners before them asked
    assert launched == []


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, True, "1", 1.0])
def test_numbers_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="from 0 to 20") as caught:
        LLM.generate(make_llm(), [[1, 2]], SamplingParams(**{field: value}))
    assert caught.value.param == field
