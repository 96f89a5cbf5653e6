"""Requests whose limits leave no token to sample: each fails alone, without a banned token.

The demo model's tokens 40 and 41 are letters; any others would do.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagewire import LLM, SamplingParams, StructuredOutputs
from pagewire.shared.base.errors import RequestFailedError
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.limits import NOTHING_LEFT
from pagewire.shared.engine.scheduling.sequence import Sequence, new_sequence
from pagewire.shared.engine.step_output import StepOutput
from pagewire.shared.request.sampling import RequestSpec

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [5, 6, 7]
A, B = 40, 41
ENDS = ((A, A), (A, B), (B, A), (B, B))
# What no check of the request sees, and how many tokens there are before nothing is left.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "after one": ({"allowed_token_ids": (A, B), "bad_words": ENDS}, 1),
    "after two": ({"allowed_token_ids": (A,), "bad_words": ((A, A, A),)}, 2),
    "of the first token": ({"allowed_token_ids": (0,), "bad_words": ((0, 0),)}, 1),
    "too soon": (
        {
            "allowed_token_ids": (A, B),
            "bad_words": ((A, A),),
            "stop_token_ids": (B,),
            "min_tokens": 3,
        },
        1,
    ),
}


def make_llm(*, overlap: bool = True, **settings: Any) -> LLM:
    llm = LLM("demo", **{"device": "cpu", "dtype": "float32", "num_blocks": 64, **settings})
    llm.core.overlap = overlap
    return llm


@pytest.fixture(scope="module")
def llm(one_thread: None) -> LLM:
    return make_llm()


def run(core: EngineCore, *sequences: Sequence) -> tuple[dict[str, list[int]], list[StepOutput]]:
    """Return the tokens that were delivered, and all other outputs."""
    tokens: dict[str, list[int]] = {each.request_id: [] for each in sequences}
    others = []
    for sequence in sequences:
        core.sequences.add(sequence)
    while core.has_work:
        outputs, _ = core.step()
        for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            tokens[name].append(token)
        for output in outputs.individual:
            tokens[output.request_id] += output.token_ids
        others += outputs.individual
    return tokens, others


def sequence_of(llm: LLM, name: str, known: list[int] | None = None, **fields: Any) -> Sequence:
    spec = RequestSpec(**{"seed": 3, "max_tokens": 12, "ignore_eos": True, **fields})
    return new_sequence(name, PROMPT, spec, llm.engine.config.eos_token_ids, known)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("fields", "count"), CASES.values(), ids=CASES)
def test_a_request_that_runs_out_of_tokens_fails_alone(
    llm: LLM, fields: dict[str, Any], count: int, temperature: float, overlap: bool
) -> None:
    core = llm.core
    core.overlap = overlap
    plain = {"temperature": 0.0}
    (alone,) = run(core, sequence_of(llm, "other", **plain))[0].values()
    generated = core.stats.tokens_generated
    other = sequence_of(llm, "other", **plain)
    tokens, others = run(core, sequence_of(llm, "x", temperature=temperature, **fields), other)
    assert len(tokens["x"]) == count
    assert set(tokens["x"]) <= set(fields["allowed_token_ids"])
    assert tokens["other"] == alone
    (error,) = [each for each in others if each.finish_reason == "error"]
    assert (error.request_id, error.error, error.param) == ("x", NOTHING_LEFT, "allowed_token_ids")
    assert "bad_words" in NOTHING_LEFT and "allowed_token_ids" in NOTHING_LEFT
    assert core.stats.tokens_generated - generated == 12 + count
    assert not core.constraints.limited
    assert llm.block_counts().used == 0


# Ids that no check has seen: what a file or a message may name, but for a bug.
BEYOND = (2048, 99_999, 2**31 - 1)
UNKNOWN: dict[str, dict[str, Any]] = {
    "stops": {"stop_token_ids": BEYOND, "min_tokens": 6},
    "biases": {"logit_bias": dict.fromkeys(BEYOND, 100.0)},
    "bad words": {"bad_words": tuple((token,) for token in BEYOND)},
    "allowed": {"allowed_token_ids": (*range(2048), *BEYOND)},
}


@pytest.mark.parametrize("fields", UNKNOWN.values(), ids=UNKNOWN)
def test_ids_beyond_the_vocabulary_have_no_effect(llm: LLM, fields: dict[str, Any]) -> None:
    assert llm.engine.config.vocab_size == 2048
    core, plain = llm.core, {"temperature": 0.0}
    (alone,) = run(core, sequence_of(llm, "x", **plain))[0].values()
    sequences = (sequence_of(llm, "x", **plain, **fields), sequence_of(llm, "other", **plain))
    tokens, others = run(core, *sequences)
    assert tokens == {"x": alone, "other": alone}
    assert [each.finish_reason for each in others if each.finish_reason] == ["length"] * 2


def test_a_request_that_always_has_a_token_ends_as_usual(llm: LLM) -> None:
    words = ((A, A), (B, B))
    asked = {"allowed_token_ids": (A, B), "bad_words": words, "temperature": 1.0}
    tokens, others = run(llm.core, sequence_of(llm, "x", **asked))
    assert tokens["x"] in ([A, B] * 6, [B, A] * 6)
    assert others[-1].finish_reason == "length"
    assert not llm.core.constraints.limited


def test_a_request_runs_out_after_tokens_of_an_earlier_worker(llm: LLM) -> None:
    fields = {"allowed_token_ids": (A, B), "bad_words": ((A, B, A), (A, B, B))}
    tokens, others = run(llm.core, sequence_of(llm, "x", [A, B], **fields))
    assert tokens["x"] == []
    assert [each.error for each in others] == [NOTHING_LEFT]


@pytest.mark.parametrize(
    "fields",
    [{"allowed_token_ids": [A]}, {"bad_words": ["b"]}, {"min_tokens": 9}],
    ids=["allowed_token_ids", "bad_words", "min_tokens"],
)
def test_with_a_grammar_what_it_forbids_is_not_delivered(llm: LLM, fields: dict[str, Any]) -> None:
    generated = llm.core.stats.tokens_generated
    asked = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=StructuredOutputs(regex="b"), **fields
    )
    with pytest.raises(RequestFailedError, match="min_tokens leave no token that it allows"):
        llm.generate("A list", asked, use_tqdm=False)
    assert llm.core.stats.tokens_generated - generated == ("min_tokens" in fields)


def test_offline_the_error_names_both_fields(llm: LLM) -> None:
    asked = SamplingParams(
        max_tokens=9, allowed_token_ids=[A], bad_words=[llm.tokenizer.decode([A, A])]
    )
    with pytest.raises(RequestFailedError, match=r"bad_words .* allowed_token_ids"):
        llm.generate([PROMPT], asked, use_tqdm=False)
