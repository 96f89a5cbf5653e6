"""Beam search against Hugging Face's, on models that end some hypotheses and not others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire import LLM, BeamSearchParams
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.engine.offline.beam_search import BeamSearch
from pagewire.tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[(n * 37 + length) % 80 + 10 for n in range(length)] for length in (3, 16, 45, 70)]
ENDS = [[41], [41, 12, 99]]  # tokens that end a text


@pytest.fixture(scope="module", params=ENDS, ids=["one-end", "three-ends"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> tuple[LLM, Any]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    theirs = write_tiny_model(path, "qwen3", "groups-of-2-odd-vocabulary")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": request.param}))
    llm = LLM(str(path), device="cpu", dtype="float32")
    theirs.generation_config.eos_token_id = list(llm.engine.config.eos_token_ids)
    return llm, theirs


@torch.inference_mode()
def expected(theirs: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[Any, float]]:
    """Return Hugging Face's hypotheses without padding, with their scores."""
    ends = None if params.ignore_eos else theirs.generation_config.eos_token_id
    if params.ignore_eos:
        theirs.generation_config.eos_token_id = None
    found = theirs.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        answer = row[len(prompt) :]
        end = next((n for n, token in enumerate(answer) if token in (ends or ())), len(answer))
        texts.append((row[: len(prompt) + end + 1], score))
    return texts


CASES = {
    "two": BeamSearchParams(beam_width=2, max_tokens=25),
    "wide": BeamSearchParams(beam_width=10, max_tokens=30),
    "long": BeamSearchParams(beam_width=4, max_tokens=40, length_penalty=2.5),
    "short": BeamSearchParams(beam_width=4, max_tokens=40, length_penalty=-1.0),
    "sums": BeamSearchParams(beam_width=5, max_tokens=30, length_penalty=0.0),
    "one-token": BeamSearchParams(beam_width=6, max_tokens=1),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_hypotheses_are_hugging_faces(pair: tuple[LLM, Any], params: BeamSearchParams) -> None:
    llm, theirs = pair
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = expected(theirs, prompt, params)
        assert [each.tokens for each in output.sequences] == [tokens for tokens, _ in wanted]
        for each, (tokens, score) in zip(output.sequences, wanted, strict=True):
            length = len(tokens) - len(prompt)
            found = each.cum_logprob / length**params.length_penalty
            assert found == pytest.approx(score, rel=1e-4)
            has_ended = tokens[-1] in llm.engine.config.eos_token_ids
            assert each.finish_reason == ("stop" if has_ended else "length")
    assert llm.block_counts().used == 0


def test_the_cases_have_both_kinds_of_ends(pair: tuple[LLM, Any]) -> None:
    llm, _ = pair
    reasons = {
        each.finish_reason
        for params in CASES.values()
        for output in llm.beam_search(PROMPTS, params)
        for each in output.sequences
    }
    assert reasons == {"stop", "length"}


def test_the_end_may_be_ignored(pair: tuple[LLM, Any]) -> None:
    llm, theirs = pair
    params = BeamSearchParams(beam_width=4, max_tokens=25, ignore_eos=True)
    before = theirs.generation_config.eos_token_id
    [output] = llm.beam_search(PROMPTS[1], params)
    try:
        wanted = expected(theirs, PROMPTS[1], params)
    finally:
        theirs.generation_config.eos_token_id = before
    assert [each.tokens for each in output.sequences] == [tokens for tokens, _ in wanted]
    assert {each.finish_reason for each in output.sequences} == {"length"}


def test_a_small_cache_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    write_tiny_model(path, "qwen3", "groups-of-2-odd-vocabulary")
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    roomy, small = (
        LLM(str(path), device="cpu", dtype="float32", num_blocks=blocks, max_model_len=128)
        for blocks in (512, 12)
    )
    pairs = zip(small.beam_search(PROMPTS, params), roomy.beam_search(PROMPTS, params), strict=True)
    for one, other in pairs:
        assert [each.tokens for each in one.sequences] == [each.tokens for each in other.sequences]
        sums = [each.cum_logprob for each in other.sequences]
        assert [each.cum_logprob for each in one.sequences] == pytest.approx(sums, abs=1e-4)


def test_a_full_context_ends_it_and_texts_are_decoded() -> None:
    llm = LLM("demo", device="cpu", dtype="float32", max_model_len=24)
    params = BeamSearchParams(beam_width=3, max_tokens=1000, ignore_eos=True)
    text = "Lambda expressions"
    [output] = llm.beam_search(text, params)
    assert llm.tokenizer is not None
    for each in output.sequences:
        assert len(each.tokens) == 24 and each.finish_reason == "length"
        assert each.text == llm.tokenizer.decode(each.tokens) and each.text.startswith(text)
    assert len({each.text for each in output.sequences}) == 3
    with pytest.raises(InvalidRequestError):
        llm.beam_search([[5] * 24], params)


@pytest.mark.parametrize(
    ("wrong", "param", "part"),
    [
        ({"beam_width": 0}, "beam_width", "from 1 to 20"),
        ({"beam_width": 20}, "beam_width", "from 1 to 18, not 20"),
        ({"max_tokens": 0}, "max_tokens", "an integer from 1"),
        ({"temperature": 0.5}, "temperature", "0"),
        ({"length_penalty": 9}, "length_penalty", "between -8 and 8"),
        (None, "params", "params must be BeamSearchParams, not dict"),
    ],
)
def test_wrong_parameters_are_named(wrong: dict[str, Any] | None, param: str, part: str) -> None:
    llm = LLM("demo", device="cpu", dtype="float32")
    fields = {"beam_width": 2, "max_tokens": 4}
    with pytest.raises(InvalidRequestError, match=part) as caught:
        params: Any = fields if wrong is None else BeamSearchParams(**{**fields, **wrong})
        llm.beam_search("x", params)
    assert caught.value.param == param


def test_tokens_that_cannot_come_are_no_candidates() -> None:
    search = BeamSearch([1], BeamSearchParams(beam_width=3, max_tokens=5), eos=(2,), room=9)
    search.advance([{5: -0.1, 2: -float("inf"), 6: -float("inf")}])
    assert [beam.tokens for beam in search.live] == [[1, 5]]
    search.advance([{2: 0.0}])
    assert search.live == []
    assert [beam.tokens for beam in search.finished] == [[1, 5, 2]]
