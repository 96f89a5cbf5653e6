"""Tokens that the model lacks: in a text they are refused as ids are, in a file at start."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, SamplingParams, StructuredOutputs
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError, ModelLoadError
from pagewire.shared.engine.offline.beam_search import BeamSearchParams
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.settings.config import RouterSettings
from pagewire.tests.support.unknown_tokens import (
    PROBLEM,
    UNKNOWN,
    VOCAB,
    edit,
    model_with_unknown_token,
)

GOOD = "Lambda expressions"
BAD = f"A {UNKNOWN} token"
PARAMS = SamplingParams(temperature=0, max_tokens=6)
FORM = StructuredOutputs(regex="[a-z]{5} [0-9]{3}")
BEAMS = BeamSearchParams(beam_width=2, max_tokens=3)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def module_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = model_with_unknown_token(tmp_path_factory.mktemp("models") / "model")
    return LLM(str(model), device="cpu", dtype="float32", num_blocks=64)


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    """An engine that answers as before, and has nothing left to do, after each test."""
    expected = module_llm.generate(GOOD, PARAMS)[0].token_ids
    yield module_llm
    assert module_llm.generate([GOOD, [5, 6]], PARAMS)[0].token_ids == expected
    assert module_llm.block_counts().used == 0
    assert not module_llm.core.has_work


CALLS: dict[str, tuple[Callable[[LLM], object], str]] = {
    "one text": (lambda llm: llm.generate(BAD, PARAMS), "prompts"),
    "the last of several": (lambda llm: llm.generate([GOOD, BAD], PARAMS), "prompts[1]"),
    "a dictionary": (lambda llm: llm.generate([{"prompt": BAD}, GOOD], PARAMS), "prompts[0]"),
    "cut off": (
        lambda llm: llm.generate(
            BAD, SamplingParams(temperature=0, max_tokens=6, truncate_prompt_tokens=1)
        ),
        "prompts",
    ),
    "scored": (
        lambda llm: llm.generate(
            [GOOD, BAD], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
        ),
        "prompts[1]",
    ),
    "embedded": (lambda llm: llm.embed([GOOD, GOOD, BAD]), "prompts[2]"),
    "searched": (lambda llm: llm.beam_search([BAD, GOOD], BEAMS), "prompts[0]"),
    "a chat": (lambda llm: llm.chat(said(BAD), PARAMS), "messages"),
    "several chats": (lambda llm: llm.chat([said(GOOD), said(BAD)], PARAMS), "messages"),
    "a chat that spells out a special token": (
        lambda llm: llm.chat(said(f"{BAD} <|user|>"), PARAMS, add_special_tokens=True),
        "messages",
    ),
}


@pytest.mark.parametrize(("call", "name"), CALLS.values(), ids=CALLS)
def test_a_text_with_a_token_that_the_model_lacks_is_refused(
    llm: LLM, call: Callable[[LLM], object], name: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call(llm)
    assert str(caught.value) == f"{name}: {PROBLEM}"
    assert caught.value.param == name.partition("[")[0]


@pytest.mark.parametrize("call", ["generate", "embed"])
def test_ids_are_refused_at_the_same_place(llm: LLM, call: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: token ids must be") as caught:
        getattr(llm, call)([GOOD, [5, VOCAB]])
    assert caught.value.param == "prompts"


def test_what_the_model_does_not_read_may_have_the_token(llm: LLM) -> None:
    prompt: Any = {"prompt": BAD, "prompt_token_ids": [5, 6, VOCAB - 1]}
    params = SamplingParams(temperature=0, max_tokens=6, stop=UNKNOWN)
    assert len(llm.generate(prompt, params)[0].token_ids) == 6
    with pytest.raises(InvalidRequestError, match="bad_words must be token ids below"):
        llm.generate(GOOD, SamplingParams(bad_words=[UNKNOWN]))


def test_the_token_does_not_hinder_structured_output(llm: LLM) -> None:
    params = SamplingParams(temperature=2, seed=1, max_tokens=40, structured_outputs=FORM)
    for output in llm.generate([GOOD] * 4, params):
        assert re.fullmatch(FORM.regex or "", output.text)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_token_that_the_model_lacks_is_refused_at_start(tmp_path: Path, name: str) -> None:
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    edit(model / "generation_config.json", eos_token_id=None)  # which otherwise counts alone
    edit(model / name, eos_token_id=[1, VOCAB])
    starts: tuple[Callable[[], object], ...] = (
        lambda: LLM(str(model), device="cpu"),
        lambda: ServedModel.load(RouterSettings(model=str(model))),
    )
    for start in starts:
        with pytest.raises(ModelLoadError) as caught:
            start()
        assert str(caught.value) == (
            f"{model / name}: eos_token_id names token {VOCAB}, but vocab_size is {VOCAB}: remove "
            "it, since the model cannot produce it"
        )
