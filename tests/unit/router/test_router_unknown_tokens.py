"""Texts with a token that the model lacks, which each endpoint of the router refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagewire.services.router.http.api.anthropic.inputs import read_message, read_message_count
from pagewire.services.router.http.api.openai.embeddings import read_embedding
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    read_chat,
    read_completion,
)
from pagewire.services.router.http.api.openai.tokens import read_tokenize
from pagewire.services.router.http.api.responses.inputs import (
    read_response,
    read_response_count,
    with_history,
)
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.settings.config import RouterSettings
from pagewire.tests.support.request_bodies import CONTEXT, encoded
from pagewire.tests.support.unknown_tokens import PROBLEM, UNKNOWN, model_with_unknown_token

Read = Callable[[bytes, ServedModel], GenerationInput]
GOOD, BAD = "A text", f"A {UNKNOWN} token"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path = model_with_unknown_token(tmp_path_factory.mktemp("models") / "model")
    loaded = ServedModel.load(RouterSettings(model=str(path), served_model_name="m"))
    return replace(loaded, max_model_len=CONTEXT)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def read_turn(raw: bytes, model: ServedModel) -> GenerationInput:
    return read_response(with_history(raw, b""), model)


def read_turn_count(raw: bytes, model: ServedModel) -> GenerationInput:
    return read_response_count(with_history(raw, b""), model)


BODIES: dict[str, tuple[Read, Callable[[str], dict[str, Any]], str]] = {
    "completion": (read_completion, lambda text: {"prompt": text}, "prompt"),
    "completions": (read_completion, lambda text: {"prompt": [GOOD, text]}, "prompt"),
    "cut completion": (
        read_completion,
        lambda text: {"prompt": text, "truncate_prompt_tokens": 1},
        "prompt",
    ),
    "chat": (read_chat, lambda text: {"messages": said(text)}, "messages"),
    "embedding": (read_embedding, lambda text: {"input": [GOOD, text]}, "input"),
    "response": (read_turn, lambda text: {"input": text}, "input"),
    "count of a response": (read_turn_count, lambda text: {"input": text}, "input"),
    "message": (read_message, lambda text: {"messages": said(text), "max_tokens": 5}, "messages"),
    "count of a message": (
        read_message_count,
        lambda text: {"messages": said(text)},
        "messages",
    ),
    "tokens of a text": (read_tokenize, lambda text: {"prompt": text}, "prompt"),
    "tokens of a chat": (read_tokenize, lambda text: {"messages": said(text)}, "messages"),
}


@pytest.mark.parametrize(("read", "body", "param"), BODIES.values(), ids=BODIES)
def test_a_text_with_a_token_that_the_model_lacks_is_refused(
    model: ServedModel, read: Read, body: Callable[[str], dict[str, Any]], param: str
) -> None:
    assert read(encoded({"model": "m", **body(GOOD)}), model).prompts
    with pytest.raises(InvalidRequestError) as caught:
        read(encoded({"model": "m", **body(BAD)}), model)
    assert caught.value.message == f"{param}: {PROBLEM}"
    assert caught.value.param == param
