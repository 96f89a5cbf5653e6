"""Request bodies, read as the router reads them."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagewire.services.router.http.api.openai.embeddings import read_embedding
from pagewire.services.router.http.api.openai.generation import (
    GenerationInput,
    read_chat,
    read_completion,
)
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.settings.config import RouterSettings

CONTEXT = 512


def served_model(**settings: Any) -> ServedModel:
    """Return the demo model with a context of `CONTEXT` tokens."""
    loaded = ServedModel.load(RouterSettings(served_model_name="m", **settings))
    return replace(loaded, max_model_len=CONTEXT)


MODEL = served_model()
PLAIN = served_model(generation_config="none")


def completion(**body: Any) -> GenerationInput:
    return read_completion(encoded({"model": "m", "prompt": "Hi", **body}), MODEL)


def chat(**body: Any) -> GenerationInput:
    messages = [{"role": "user", "content": "Hi"}]
    return read_chat(encoded({"model": "m", "messages": messages, **body}), MODEL)


def embedding(**body: Any) -> GenerationInput:
    return read_embedding(encoded({"model": "m", "input": "Hi", **body}), MODEL)


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def refusal(call: Callable[..., object], **body: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call(**body)
    return caught.value
