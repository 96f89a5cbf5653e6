"""How requests name their sessions, and for how long cached blocks are to be kept."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from pagewire.services.router.dispatch.sender import Sender
from pagewire.services.router.http.api.anthropic.chat import longest_ttl
from pagewire.services.router.http.api.anthropic.inputs import read_message
from pagewire.services.router.http.api.anthropic.schemas import MessagesBody
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.responses.inputs import read_response, with_history
from pagewire.services.router.http.routes.generation import SESSION_HEADER, session_in_head
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request.sampling import RequestSpec
from pagewire.tests.support.request_bodies import MODEL, chat, completion, encoded

HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
MINUTES: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
HELLO = {"type": "text", "text": "Hello"}


def message(*blocks: dict[str, Any], **fields: Any) -> GenerationInput:
    content = blocks or (HELLO,)
    given = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    return read_message(encoded(given | fields), MODEL)


def response(**fields: Any) -> GenerationInput:
    raw = encoded({"model": "m", "input": "Hello", "store": False, **fields})
    return read_response(with_history(raw, b""), MODEL)


def request_with(header: str, value: str | None) -> Request:
    headers = [] if value is None else [(header.encode(), value.encode())]
    return Request({"type": "http", "headers": headers})


def seconds_of(asked: GenerationInput) -> int:
    return asked.prompts[0].spec.retain_s


@pytest.mark.parametrize("call", [chat, completion, response])
def test_a_key_of_the_cache_is_not_the_name_of_a_session(call: Any) -> None:
    asked = call(session_id="s", prompt_cache_key="k")
    assert (asked.session, asked.cache_key) == ("s", "k")
    asked = call(prompt_cache_key="k")
    assert (asked.session, asked.cache_key) == (None, "k")
    assert (call().session, call().cache_key) == (None, None)


def test_the_user_of_anthropics_api_is_a_key_of_the_cache() -> None:
    user = {"user_id": "u"}
    asked = message(session_id="s", metadata=user)
    assert (asked.session, asked.cache_key) == ("s", "u")
    asked = message(metadata=user)
    assert (asked.session, asked.cache_key) == (None, "u")
    assert message(metadata={}).cache_key is None


@pytest.mark.parametrize("name", ["s", "Sitzung \u00e4\u4f1a", "\u00e9" * 512, None])
def test_the_header_names_a_session_as_the_body_does(name: str | None) -> None:
    assert session_in_head(request_with(SESSION_HEADER, name)) == name


def test_a_header_whose_name_is_too_long_is_refused_and_an_empty_one_has_none() -> None:
    with pytest.raises(InvalidRequestError, match="up to 512 characters, not 513"):
        session_in_head(request_with(SESSION_HEADER, "x" * 513))
    assert session_in_head(request_with(SESSION_HEADER, "")) is None


@pytest.mark.parametrize("call", [chat, completion, response])
def test_openais_field_says_how_long_blocks_are_kept(call: Any) -> None:
    times = {"in_memory": 300, "in-memory": 300, "5m": 300, "1h": 3600, "24h": 86400}
    found = {text: seconds_of(call(prompt_cache_retention=text)) for text in times}
    assert found == times
    assert seconds_of(call()) == 0


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        (message(), 0),
        (message(**MINUTES), 300),
        (message(HELLO | MINUTES), 300),
        (message(HELLO | HOUR, HELLO | MINUTES), 3600),
        (message(system=[HELLO | HOUR]), 3600),
        (message(HELLO | {"cache_control": None}), 0),
    ],
    ids=["none", "body", "block", "longest", "system", "null"],
)
def test_the_longest_time_in_a_message_request_counts(asked: GenerationInput, seconds: int) -> None:
    assert seconds_of(asked) == seconds


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"name": "f", "input_schema": {"type": "object"}, **HOUR}]},
        {"messages": [{"role": "assistant", "content": [CALL | HOUR]}]},
        {"messages": [{"role": "user", "content": [RESULT | HOUR]}]},
        {"messages": [{"role": "user", "content": [RESULT | {"content": [HELLO | HOUR]}]}]},
    ],
    ids=["tool", "call", "result", "within a result"],
)
def test_it_may_be_said_with_tools_calls_and_results(fields: dict[str, Any]) -> None:
    given = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
    assert longest_ttl(msgspec.convert(given, MessagesBody)) is None
    assert longest_ttl(msgspec.convert(given | fields, MessagesBody)) == "1h"


@pytest.mark.parametrize("wrong", [{"type": "ephemeral", "ttl": "2h"}, {"type": "forever"}, {}])
def test_another_cache_control_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        message(HELLO | {"cache_control": wrong})
    assert refused.value.param == "messages[0].content[0]"
    assert "cache_control is left out" in refused.value.message
    with pytest.raises(InvalidRequestError) as refused:
        message(cache_control=wrong)
    assert (refused.value.param or "").startswith("cache_control")


def test_a_session_that_does_not_say_how_long_is_kept_for_five_minutes() -> None:
    spec = RequestSpec()
    assert Sender("r", "key").sign(spec).retain_s == 0
    assert Sender("r", "key", session="s").sign(spec).retain_s == 300
    assert Sender("r", "key", session="s").sign(RequestSpec(retain_s=3600)).retain_s == 3600


def test_a_session_has_the_same_number_in_all_requests_of_its_owner() -> None:
    number = Sender("r", "key", session="s").session_number
    assert number is not None
    assert number == Sender("r2", "key", session="s").session_number
    assert number != Sender("r", "other", session="s").session_number
    assert Sender("r", "key", session="").session_number is None


def test_a_key_of_the_cache_guides_placement_and_retains_no_blocks() -> None:
    keyed = Sender("r", "key", cache_key="app")
    assert keyed.sign(RequestSpec()).retain_s == 0
    assert keyed.session_number == Sender("r2", "key", cache_key="app").session_number is not None
    both = Sender("r", "key", session="s", cache_key="app")
    assert both.session_number == Sender("r", "key", session="s").session_number
    assert both.sign(RequestSpec()).retain_s == 300
    asked_for = Sender("r", "key", cache_key="app").sign(RequestSpec(retain_s=3600))
    assert asked_for.retain_s == 3600
