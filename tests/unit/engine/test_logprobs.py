"""Columns of log probabilities, and how responses show them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from pagewire.services.router.http.api.openai.logprobs import (
    LEAST,
    CompletionLogprobs,
    chat_logprobs,
    finite,
    prompt_logprobs,
)
from pagewire.services.router.http.api.openai.objects import TopToken
from pagewire.shared.model.demo import demo_model_path
from pagewire.shared.request.logprobs import Logprobs, PromptLogprobs, Token, join
from pagewire.shared.text.answer_text import TextDelta
from pagewire.shared.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_dir(demo_model_path())
TOKEN_BYTES = TOKENIZER.token_bytes


def columns(token_ids: list[int], top: int = 2) -> Logprobs:
    """Tokens of rank 7, whose alternatives are the next ids."""
    ids = np.array([range(i, i + 1 + top) for i in token_ids], np.int32).reshape(-1, 1 + top)
    logprobs = np.linspace(-4.0, -0.5, ids.size).astype(np.float32)
    ranks = np.full(len(token_ids), 7, np.int32)
    return Logprobs(1 + top, ids.tobytes(), logprobs.tobytes(), ranks.tobytes())


def test_columns_are_the_tokens_that_went_in() -> None:
    first, second = columns([10, 20])
    assert (first.id, first.rank, first.logprob) == (10, 7, -4.0)
    assert [token_id for token_id, _ in first.top] == [11, 12]
    assert second.top[1][1] == -0.5
    assert isinstance(first, Token)
    assert next(iter(columns([5], top=0))).top == []
    assert len(columns([])) == 0 and list(columns([])) == []


def test_parts_join_to_the_whole() -> None:
    whole = columns(list(range(50, 60)))
    for cut in (0, 1, 9, 10):
        assert join([whole.part(0, cut), whole.part(cut, 99)]) == whole
    assert join([]) is None
    assert list(whole.part(3, 5)) == list(whole)[3:5]


@pytest.mark.parametrize("ranks", [b"", b"\0" * 4, b"\0" * 3, b"\0" * 12])
def test_columns_of_different_lengths_are_refused(ranks: bytes) -> None:
    good = columns([1, 2])
    with pytest.raises(ValueError, match="different lengths"):
        Logprobs(good.width, good.ids, good.logprobs, ranks)
    encoded = msgspec.msgpack.encode([good.width, good.ids, good.logprobs, ranks])
    with pytest.raises(msgspec.ValidationError, match="different lengths"):
        msgspec.msgpack.decode(encoded, type=Logprobs)


def test_what_is_known_of_a_prompt_is_left_out() -> None:
    part = PromptLogprobs(5, columns([10, 20, 30]))
    assert part.end == 8
    assert part.since(1) == part
    assert [token.id for token in part.since(6).tokens] == [20, 30]
    assert part.since(6).start == 6
    assert len(part.since(8).tokens) == len(part.since(100).tokens) == 0
    parts = list(PromptLogprobs(1, columns([3] * 1100)).parts())
    assert [(each.start, len(each.tokens)) for each in parts] == [(1, 512), (513, 512), (1025, 76)]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e9])
def test_a_token_that_cannot_come_has_a_number_all_the_same(value: float) -> None:
    assert finite(value) == LEAST
    assert finite(-1.5) == -1.5
    one = np.full((1, 3), value, np.float32)
    logprobs = msgspec.structs.replace(columns([300]), logprobs=one.tobytes())
    shown: list[Any] = [
        chat_logprobs(logprobs, TOKEN_BYTES),
        CompletionLogprobs(TOKEN_BYTES, None).of(TextDelta("x", None, (300,), logprobs)),
        prompt_logprobs(logprobs, TOKEN_BYTES),
    ]
    assert "null" not in msgspec.json.encode(shown[0].content).decode()
    assert shown[1].token_logprobs == [LEAST]
    assert shown[2][1]["300"].logprob == LEAST


def test_bytes_of_chat_tokens_join_to_the_text() -> None:
    text = " naïve — 東京 🌍"
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    content = chat_logprobs(columns(token_ids), TOKEN_BYTES).content
    assert b"".join(bytes(entry.bytes) for entry in content) == text.encode()
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert isinstance(content[0].top_logprobs[0], TopToken)


def test_parts_of_characters_have_names_of_their_own_in_completions() -> None:
    first = TOKENIZER.encode("🌍", add_special_tokens=False)[0]
    assert [TOKEN_BYTES.of(first + more) for more in range(3)] == [b"\xf0", b"\xf1", b"\xf2"]
    shown = CompletionLogprobs(TOKEN_BYTES, None).of(
        TextDelta("", None, (first,), columns([first]))
    )
    assert shown is not None
    assert shown.tokens == [r"bytes:\xf0"]
    assert shown.top_logprobs == [{r"bytes:\xf1": -2.25, r"bytes:\xf2": -0.5, r"bytes:\xf0": -4.0}]


def test_tokens_are_named_by_their_ids_if_asked_for() -> None:
    found = columns([300], top=1)
    content = chat_logprobs(found, TOKEN_BYTES, by_id=True).content[0]
    assert (content.token, content.bytes) == ("token_id:300", list(TOKEN_BYTES.of(300)))
    assert [each.token for each in content.top_logprobs] == ["token_id:301"]
    shown = CompletionLogprobs(TOKEN_BYTES, None, by_id=True).of(
        TextDelta("x", None, (300,), found)
    )
    assert shown is not None
    assert shown.tokens == ["token_id:300"]
    assert (shown.top_logprobs[0] or {}).keys() == {"token_id:300", "token_id:301"}


def test_a_log_probability_is_the_same_float32_after_json() -> None:
    values = -np.random.default_rng(3).exponential(4.0, (500, 1)).astype(np.float32)
    found = msgspec.structs.replace(columns([7] * 500, top=0), logprobs=values.tobytes())
    content = msgspec.json.decode(msgspec.json.encode(chat_logprobs(found, TOKEN_BYTES)))
    read = np.array([each["logprob"] for each in content["content"]])
    assert read.dtype == np.float64
    assert (read == values[:, 0].astype(np.float64)).all()


@pytest.mark.parametrize("size", [1, 2, 100])
def test_offsets_of_a_completion_go_on_over_its_parts(size: int) -> None:
    prompt, text = "Where?", " naïve — 東京 🌍 it is"
    prompt_ids, token_ids = TOKENIZER.encode(prompt), TOKENIZER.encode(text)[1:]
    assert TOKEN_BYTES.is_special(prompt_ids[0])
    shown = CompletionLogprobs(TOKEN_BYTES, prompt_ids[0])
    parts = [shown.of(TextDelta("", prompt_logprobs=columns(prompt_ids[1:])))]
    for at in range(0, len(token_ids), size):
        ids = token_ids[at : at + size]
        parts.append(shown.of(TextDelta("", None, tuple(ids), columns(ids))))
    found: dict[str, list[Any]] = {}
    for part in parts:
        assert part is not None
        for name, values in msgspec.structs.asdict(part).items():
            found.setdefault(name, []).extend(values)
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert all(value is not None for value in found["token_logprobs"][1:])
    assert found["text_offset"][:2] == [0, 0]  # a special token has no text
    whole = prompt + text
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert whole[offset : offset + len(token)] == token
    assert shown.of(TextDelta("", "stop")) is None


def test_a_prompt_of_one_token_has_null_alone() -> None:
    assert prompt_logprobs(None, TOKEN_BYTES) == [None]
    shown = CompletionLogprobs(TOKEN_BYTES, 300).of(TextDelta("", "length"))
    assert shown is not None and shown.token_logprobs == [None]


def test_the_log_probabilities_of_a_prompt_that_is_not_echoed_are_not_the_choices() -> None:
    both = TextDelta("x", None, (300,), columns([300]), prompt_logprobs=columns([5, 6]))
    shown = CompletionLogprobs(TOKEN_BYTES, None).of(both)
    assert shown is not None
    assert shown.tokens == [TOKEN_BYTES.name(300)] and shown.text_offset == [0]
    of_prompt = TextDelta("", prompt_logprobs=columns([5, 6]))
    assert CompletionLogprobs(TOKEN_BYTES, None).of(of_prompt) is None


def test_an_echoed_token_has_as_many_alternatives_as_one_of_the_answer() -> None:
    shown = CompletionLogprobs(TOKEN_BYTES, 4, num_top=1).of(
        TextDelta("x", None, (300,), columns([300], top=1), columns([5], top=3))
    )
    assert shown is not None
    assert [len(each or {}) for each in shown.top_logprobs] == [0, 2, 2]
