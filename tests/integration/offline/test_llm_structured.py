"""Answers that follow a grammar are the same tokens, however their steps are cut and mixed."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLParserLimits

from pagewire import LLM, SamplingParams, StructuredOutputs
from pagewire.shared.base.errors import InvalidRequestError, RequestFailedError
from pagewire.shared.engine.scheduling.sequence import new_sequence
from pagewire.shared.grammar import compiler
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.sampling import RequestSpec, SamplingDefaults
from pagewire.tests.support.logprob_truth import LogprobTruth

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
        "kind": {"enum": ["list", "tuple"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
ASKED = [
    StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputs(regex=r"[A-Z][a-z]{4,9}( [a-z]{2,6}){3}"),
    StructuredOutputs(choice=["a list of names", "a tuple"]),
    StructuredOutputs(grammar='start: "[" /[0-9]{2}/ ("," /[0-9]{2}/)~5 "]"'),
    None,
    StructuredOutputs(json_object=True, whitespace_pattern=" ?"),
]
PROMPTS = [f"{text} is" for text in ("A list", "The class", "def f(x)", "An", "The", "Here it")] * 2
PARAMS = [
    SamplingParams(temperature=0.0 if row < 6 else 0.9, seed=row, max_tokens=48,
                   structured_outputs=asked)
    for row, asked in enumerate(ASKED * 2)
]  # fmt: skip


def make_llm(*, overlap: bool = True, **settings: Any) -> LLM:
    llm = LLM("demo", **{"device": "cpu", "dtype": "float32", **settings})
    llm.core.overlap = overlap
    return llm


def spec_of(asked: SamplingParams, max_tokens: int) -> RequestSpec:
    spec = asked.resolve(SamplingDefaults(temperature=0.0), max_tokens)
    assert asked.structured_outputs is not None
    return msgspec.structs.replace(spec, grammar=grammar_text(asked.structured_outputs))


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.core.scheduler.table.check_integrity()
    assert not llm.core.has_work
    assert not llm.core.constraints.is_active
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(one_thread: None) -> list[list[int]]:
    """Each answer by itself, without overlap."""
    llm = make_llm(overlap=False)
    pairs = zip(PROMPTS, PARAMS, strict=True)
    return [llm.generate([prompt], params)[0].token_ids for prompt, params in pairs]


def test_answers_have_the_form_that_was_asked_for(alone: list[list[int]]) -> None:
    llm = make_llm()
    assert llm.tokenizer is not None
    texts = [llm.tokenizer.decode(tokens) for tokens in alone]
    for row in (0, 6):
        Draft202012Validator(SCHEMA).validate(json.loads(texts[row]))
        assert re.fullmatch(r"[A-Z][a-z]{4,9}( [a-z]{2,6}){3}", texts[row + 1])
        assert texts[row + 2] in ("a list of names", "a tuple")
        assert re.fullmatch(r"\[\d\d(,\d\d){5}\]", texts[row + 3])
        assert isinstance(json.loads(texts[row + 5] or "{"), dict)
    assert alone[:6] != alone[6:]


@pytest.mark.parametrize("overlap", [False, True])
def test_in_a_batch(alone: list[list[int]], overlap: bool) -> None:
    assert tokens_of(make_llm(overlap=overlap)) == alone


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_whose_masks_are_late(alone: list[list[int]], overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    llm.core.constraints.mask_wait_s = (0.0, 0.0)
    assert tokens_of(llm) == alone
    assert llm.core.stats.rows_skipped > 20
    assert llm.core.stats.tokens_generated < sum(map(len, alone)) + len(alone) + 1


@pytest.mark.parametrize("mask_wait_s", [0.0, 1.0])
def test_after_a_preemption(alone: list[list[int]], mask_wait_s: float) -> None:
    llm = make_llm(num_blocks=10, max_num_batched_tokens=40, max_model_len=160)
    llm.core.constraints.mask_wait_s = (mask_wait_s, mask_wait_s)
    assert tokens_of(llm) == alone
    assert llm.core.scheduler.table.num_preemptions > 0


@pytest.mark.gpu
def test_with_captured_steps(alone: list[list[int]]) -> None:
    """Forward and sampling are graphs of their own; a skipped row's token goes nowhere."""
    runs = []
    for mask_wait_s in (0.05, 0.0):
        llm = make_llm(device="cuda", num_blocks=4096)  # both are in memory for a while
        llm.core.constraints.mask_wait_s = (mask_wait_s, mask_wait_s)
        runs.append(tokens_of(llm))
        assert llm.core.stats.rows_skipped > 20 or mask_wait_s > 0
    assert runs[0] == runs[1] == alone


def test_from_any_token_on(alone: list[list[int]]) -> None:
    """As after a migration: the output so far comes with the request."""
    llm = make_llm()
    core, texts = llm.core, llm.tokenizer
    assert texts is not None
    for row, known in ((0, 1), (1, 5), (6, 9), (7, 3), (9, 10)):
        spec = spec_of(PARAMS[row], 48)
        prompt, start = texts.encode(PROMPTS[row]), alone[row][:known]
        eos = llm.engine.config.eos_token_ids
        sequence = new_sequence("again", prompt, spec, eos, start)
        core.sequences.add(sequence)
        while core.has_work:
            core.step()
        assert sequence.token_ids[len(prompt) :] == alone[row]


def test_held_rows_do_not_count_towards_penalties() -> None:
    asked = SamplingParams(
        temperature=0.9,
        seed=3,
        max_tokens=60,
        frequency_penalty=1.5,
        repetition_penalty=1.2,
        structured_outputs=StructuredOutputs(regex="([a-z]{1,6} ){12}"),
    )
    tokens = []
    for mask_wait_s in (1.0, 0.0):
        llm = make_llm()
        llm.core.constraints.mask_wait_s = (mask_wait_s, mask_wait_s)
        tokens.append([output.token_ids for output in llm.generate(PROMPTS[:6], asked)])
        assert (llm.core.stats.rows_skipped > 20) == (mask_wait_s == 0.0)
    assert tokens[0] == tokens[1]
    other = msgspec.structs.replace(asked, frequency_penalty=0.0)
    assert [output.token_ids for output in make_llm().generate(PROMPTS[:6], other)] != tokens[0]


def test_mask_and_other_rules_that_leave_nothing_fail_the_row() -> None:
    asked = SamplingParams(max_tokens=9, min_tokens=8, structured_outputs=ASKED[2])
    with pytest.raises(RequestFailedError, match="the grammar cannot be followed"):
        make_llm().generate("x", asked)


def test_answers_that_use_up_the_states_of_their_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to one grammar share a lexer, so that each fails where others needed many states."""
    form = StructuredOutputs(regex="(a|b)*a(a|b){20}")
    params = [
        SamplingParams(temperature=2.0, seed=seed, max_tokens=40, structured_outputs=form)
        for seed in range(24)
    ]
    answers = [output.token_ids for output in make_llm().generate(["x"] * 24, params)]
    limits = LLParserLimits(max_lexer_states=150)
    monkeypatch.setattr(compiler, "parser_limits", lambda _size: limits)
    llm = make_llm()
    assert [output.token_ids for output in llm.generate(["x"] * 24, params)] == answers
    assert [llm.generate("x", each)[0].token_ids for each in params] == answers


def test_several_answers_to_a_prompt() -> None:
    asked = SamplingParams(temperature=1.0, seed=4, max_tokens=60, n=5, structured_outputs=ASKED[0])
    llm = make_llm()
    outputs = llm.generate([PROMPTS[0]], asked)[0].outputs
    assert len({output.text for output in outputs}) > 1
    for output in outputs:
        Draft202012Validator(SCHEMA).validate(json.loads(output.text))
    llm.core.constraints.mask_wait_s = (0.0, 0.0)
    again = llm.generate([PROMPTS[0]], asked)[0].outputs
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]


def test_stop_strings_end_an_answer_in_the_middle() -> None:
    asked = SamplingParams(max_tokens=60, stop='"size"', structured_outputs=ASKED[0])
    output = make_llm().generate(PROMPTS[0], asked)[0].outputs[0]
    assert output.text.startswith('{"name":"') and '"size"' not in output.text
    assert (output.finish_reason, output.stop_reason) == ("stop", '"size"')


def test_log_probabilities_stay_raw() -> None:
    asked = msgspec.structs.replace(PARAMS[6], logprobs=2)
    output = make_llm().generate([PROMPTS[6]], asked)[0]
    assert output.outputs[0].logprobs is not None
    found = [
        {token: each.logprob for token, each in by_id.items()}
        for by_id in output.outputs[0].logprobs
    ]
    LogprobTruth().check(output.prompt_token_ids, output.token_ids, [*found], 2)
    assert (
        min(map(min, (by_id.values() for by_id in found))) < -8
    )  # the model's own choice it is not


def test_grammar_that_cannot_be_followed_fails_its_row_alone(alone: list[list[int]]) -> None:
    """One that is accepted, and too complex for its limits a few tokens later."""
    llm = make_llm()
    hostile = StructuredOutputs(grammar="start: s\ns: s s s | s s | /[a-z ]/ | \n")
    spec = spec_of(SamplingParams(temperature=1.0, seed=1, structured_outputs=hostile), 400)
    core, outputs = llm.core, []
    core.sequences.add(new_sequence("hostile", [1, 2, 3], spec, ()))
    core.sequences.add(new_sequence("free", [1, 2, 3], RequestSpec(max_tokens=300), ()))
    while core.has_work:
        outputs += core.step()[0].individual
    ended = {output.request_id: output for output in outputs if output.finish_reason}
    assert ended["hostile"].finish_reason == "error"
    assert "ways to go on, of which 500 are possible" in (ended["hostile"].error or "")
    assert ended["free"].finish_reason == "length"
    assert tokens_of(llm) == alone


BEYOND_INT64 = (
    '{"type": "integer", "maximum": -9223372036854775807, "minimum": -18446744073709551616}'
)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (StructuredOutputs(regex="("), "regex"),
        (StructuredOutputs(regex="a", choice=["b"]), "only one of"),
        (StructuredOutputs(json="{"), "json cannot be read"),
        (StructuredOutputs(json={"type": "text"}), "Invalid type"),
        (StructuredOutputs(grammar="start: missing"), "missing"),
        (StructuredOutputs(grammar=f"start: %json {BEYOND_INT64}"), "%json: minimum and maximum"),
        (StructuredOutputs(json={"enum": ["x" * 200_000]}), "too large"),
        (StructuredOutputs(regex=3), "Expected `str"),
        (StructuredOutputs(choice=[]), "length >= 1"),
        ({"yaml": "a"}, "unknown field"),
    ],
)
def test_wrong_form_is_refused_before_anything_runs(asked: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as caught:
        make_llm().generate("x", SamplingParams(structured_outputs=asked))
    assert caught.value.param == "structured_outputs"
    assert not isinstance(caught.value, RequestFailedError)
