"""The messages of a chat, as the router reads them."""

import json
from typing import Any

import pytest

from pagewire.services.router.http.api.openai.generation import GenerationInput, read_chat
from pagewire.services.router.http.api.openai.prompts import MAX_CHARS_PER_TOKEN
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.tests.support.request_bodies import MODEL

GOOD = {"role": "user", "content": "Hi"}


def chat(messages: Any) -> GenerationInput:
    return read_chat(json.dumps({"model": "m", "messages": messages}).encode(), MODEL)


def refused_field(messages: Any) -> str | None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(messages)
    return caught.value.param


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": {}},
        {"role": "user", "content": ["Hi"]},
        {"role": "user", "content": [{"text": "Hi"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None},
    ],
    ids=str,
)
def test_a_message_without_text_is_refused(message):
    assert refused_field([GOOD, message]) == "messages[1].content"


def test_empty_answers_and_system_prompts_may_be_part_of_the_conversation():
    turns = [("system", ""), ("user", "Hi"), ("assistant", ""), ("user", "Are you there?")]
    assert chat([{"role": role, "content": content} for role, content in turns]).prompts


@pytest.mark.parametrize("empty", ["", [], [{"type": "text", "text": ""}]], ids=str)
def test_a_user_may_have_written_nothing(empty):
    (prompt,) = chat([GOOD, {"role": "user", "content": empty}]).prompts
    messages = [GOOD, {"role": "user", "content": ""}]
    assert prompt.token_ids == MODEL.tokenizer.encode_chat(messages)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "function", "content": "Hi"}], "messages[0].role"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "x"}] * 5000, "messages"),
    ],
    ids=["empty", "text", "number", "no role", "other role", "tool calls", "too many"],
)
def test_wrong_lists_of_messages_are_refused(messages, param):
    assert refused_field(messages) == param


@pytest.mark.parametrize("field", ["content", "name", "reasoning", "reasoning_content"])
def test_all_texts_of_messages_count_for_their_length(field):
    answer = {"role": "assistant", "content": "Hello", field: "x" * (512 * MAX_CHARS_PER_TOKEN)}
    with pytest.raises(InvalidRequestError, match="characters in the messages cannot fit"):
        chat([GOOD, answer, GOOD])


def test_text_parts_are_joined_and_developers_are_the_system():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    joined = chat([{"role": "developer", "content": parts}])
    plain = chat([{"role": "system", "content": "Hello"}])
    assert joined.prompts[0].token_ids == plain.prompts[0].token_ids
