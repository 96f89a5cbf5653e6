import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.exceptions import HTTPException

from pagewire.services.cli.client.sse import EventParser
from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.formats import (
    DONE,
    ChatFormat,
    CompletionFormat,
    model_record,
)
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api_errors import BodyTooLargeError, ContextLengthError, describe
from pagewire.shared.base.errors import (
    ChannelError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
    RequestFailedError,
)
from pagewire.shared.text.answer_text import TextDelta
from pagewire.tests.support.request_bodies import MODEL, chat, completion

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)


def completions(asked: GenerationInput) -> CompletionFormat:
    return CompletionFormat(MODEL, asked)


def chats(asked: GenerationInput) -> ChatFormat:
    return ChatFormat(MODEL, asked)


def events(raw: bytes) -> list[dict]:
    return [json.loads(data) for data in EventParser().feed(raw) if data != b"[DONE]"]


def test_a_completion_is_what_openais_client_reads():
    form = completions(completion(n=2, echo=True, prompt="Echo"))
    raw = form.full_response([TextDelta(" one", "stop"), TextDelta(" two", "length")], USAGE)
    parsed = Completion.model_validate_json(raw, strict=True)
    assert [c.text for c in parsed.choices] == ["Echo one", "Echo two"]
    assert [c.finish_reason for c in parsed.choices] == ["stop", "length"]
    assert parsed.usage.total_tokens == 10
    assert parsed.usage.prompt_tokens_details.cached_tokens == 4
    assert parsed.id.startswith("cmpl-")


def test_a_chat_answer_is_what_openais_client_reads():
    raw = chats(chat()).full_response([TextDelta("Hello", "stop")], USAGE)
    parsed = ChatCompletion.model_validate_json(raw, strict=True)
    assert parsed.choices[0].message.content == "Hello"
    assert parsed.choices[0].message.role == "assistant"
    assert parsed.id.startswith("chatcmpl-")


def test_chat_chunks_begin_with_the_role_and_end_with_a_reason():
    form = chats(chat(n=2))
    deltas = [(0, TextDelta("A")), (1, TextDelta("")), (0, TextDelta("", "stop"))]
    chunks = [
        ChatCompletionChunk.model_validate(e) for d in deltas for e in events(form.stream_chunk(*d))
    ]
    assert [c.choices[0].delta.role for c in chunks] == ["assistant", "assistant", None]
    assert [c.choices[0].delta.content for c in chunks] == ["A", "", None]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, "stop"]
    assert len({c.id for c in chunks}) == 1
    assert form.last(USAGE) == DONE


def test_a_chunk_without_text_is_no_event():
    form = chats(chat())
    form.stream_chunk(0, TextDelta("x"))
    assert form.stream_chunk(0, TextDelta("")) == b""
    assert completions(completion()).stream_chunk(0, TextDelta("")) == b""


@pytest.mark.parametrize("with_last", [False, True])
def test_each_chunk_has_the_usage_so_far_if_asked_for(with_last):
    deltas = [
        (0, TextDelta("A", None, (5,))),
        (1, TextDelta("B", None, (6, 7))),
        (0, TextDelta("", None, (8,))),  # no chunk: its token is counted by the next
        (0, TextDelta("C", None, (9,))),
        (1, TextDelta("", "stop", (1,))),
    ]
    options = {"include_usage": with_last, "continuous_usage_stats": True}
    streamed = {"n": 2, "stream": True, "stream_options": options}
    for form, asked in (
        (completions(found := completion(**streamed)), found),
        (chats(found := chat(**streamed)), found),
    ):
        count = len(asked.prompts[0].token_ids)
        chunks = [event for delta in deltas for event in events(form.stream_chunk(*delta))]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3, 5, 6]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {count}
        totals = [chunk["usage"]["total_tokens"] - count for chunk in chunks]
        assert totals == [1, 3, 5, 6]
        assert len(events(form.last(USAGE))) == with_last


def test_a_service_tier_is_echoed_where_one_is_named():
    delta, named = TextDelta("one", "stop"), {"service_tier": "flex"}
    for form in (completions(completion(**named)), chats(chat(**named))):
        full = json.loads(form.full_response([delta], USAGE))
        (chunk,) = events(form.stream_chunk(0, delta))
        assert full["service_tier"] == chunk["service_tier"] == "default"
    assert "service_tier" not in json.loads(chats(chat()).full_response([delta], USAGE))


def test_token_ids_of_prompts_are_in_the_response_or_the_first_chunks():
    prompts = [[5, 6], [5, 6], [7], [7]]
    asked = completion(prompt=[[5, 6], [7]], n=2, return_token_ids=True)
    deltas = [TextDelta("x", "stop", (index, 2)) for index in range(4)]
    full = json.loads(completions(asked).full_response(deltas, USAGE))
    found = [(each["prompt_token_ids"], each["token_ids"]) for each in full["choices"]]
    assert found == [(prompt, [index, 2]) for index, prompt in enumerate(prompts)]

    form = completions(asked)
    parts = [(3, TextDelta("", None)), (3, TextDelta("", None, (1,))), (0, TextDelta("a"))]
    parts += [(3, TextDelta("b", "stop", (2,))), (0, TextDelta("c", None, (4,)))]
    chunks = [e["choices"][0] for part in parts for e in events(form.stream_chunk(*part))]
    assert [each["index"] for each in chunks] == [3, 0, 3, 0]
    assert [each.get("prompt_token_ids") for each in chunks] == [[7], [5, 6], None, None]


def test_token_ids_of_a_chats_prompt_are_in_the_response_or_the_first_chunk():
    asked = chat(n=2, return_token_ids=True)
    prompt = asked.prompts[0].token_ids
    deltas = [TextDelta("x", "stop", (1, 2))] * 2
    full = json.loads(chats(asked).full_response(deltas, USAGE))
    assert full["prompt_token_ids"] == prompt
    assert [each["token_ids"] for each in full["choices"]] == [[1, 2]] * 2

    form = chats(asked)
    parts = [(1, TextDelta("a", None, (1,))), (0, TextDelta("b", None, (2,)))]
    chunks = [event for part in parts for event in events(form.stream_chunk(*part))]
    assert [each.get("prompt_token_ids") for each in chunks] == [prompt, None]
    assert [each["choices"][0]["token_ids"] for each in chunks] == [[1], [2]]
    assert all("prompt_token_ids" not in each for each in events(chunk_after_one(asked)))
    plain = json.loads(chats(chat(n=2)).full_response(deltas, USAGE))
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


def chunk_after_one(asked: GenerationInput) -> bytes:
    """The end of a stream that has had a single chunk."""
    form = chats(msgspec.structs.replace(asked, include_usage=True))
    form.stream_chunk(0, TextDelta("a", "stop", (1,)))
    return form.last(USAGE)


def test_each_chunk_has_token_ids_where_they_are_asked_for():
    """Also the last one of an answer that ends without a further token, as after a migration."""
    asked = {"return_token_ids": True}
    deltas = [TextDelta("a", None, (1,)), TextDelta("", "length")]
    for form in (completions(completion(**asked)), chats(chat(**asked))):
        chunks = [event for delta in deltas for event in events(form.stream_chunk(0, delta))]
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[1], []]
        full = json.loads(form.full_response([TextDelta("", "length")], USAGE))
        assert full["choices"][0]["token_ids"] == []


def test_an_echo_comes_once_and_first():
    form = completions(completion(prompt="Echo", echo=True))
    deltas = [(0, TextDelta("")), (0, TextDelta(" a")), (0, TextDelta("b"))]
    texts = [e["choices"][0]["text"] for d in deltas for e in events(form.stream_chunk(*d))]
    assert texts == ["Echo", " a", "b"]


HOSTILE_NAME = 'a"text":""b"content":""\\'


@given(st.lists(st.tuples(st.integers(0, 1), st.text())), st.booleans())
def test_an_event_of_text_alone_is_encoded_as_any_other(deltas, usage):
    streamed = {"n": 2, "stream": True, "stream_options": {"include_usage": usage}}
    echoed = completion(prompt="Echo", echo=True, **streamed)
    for form, key in (
        (completions(msgspec.structs.replace(echoed, model=HOSTILE_NAME)), "text"),
        (chats(msgspec.structs.replace(chat(**streamed), model=HOSTILE_NAME)), "delta"),
    ):
        for index, text in deltas:
            raw = form.stream_chunk(index, TextDelta(text))
            for event in events(raw):
                assert raw == b"data: " + msgspec.json.encode(event) + b"\n\n"
                assert list(event)[:4] == ["id", "object", "created", "model"]
                assert ("usage" in event) == usage
                assert event["model"] == HOSTILE_NAME
                choice = event["choices"][0]
                assert list(choice) == ["index", key, "logprobs", "finish_reason"]
                assert (choice["index"], choice["finish_reason"]) == (index, None)
                shown = choice["text"] if key == "text" else choice["delta"]["content"]
                assert shown.removeprefix("Echo") == text.removeprefix("Echo")


def test_usage_is_null_until_the_last_chunk():
    form = chats(chat(stream=True, stream_options={"include_usage": True}))
    (chunk,) = events(form.stream_chunk(0, TextDelta("x")))
    (last,) = events(form.last(USAGE))
    assert chunk["usage"] is None
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert form.last(USAGE).endswith(DONE)


def test_a_model_record_is_what_openais_client_reads():
    record = Model.model_validate(msgspec.to_builtins(model_record(MODEL, "m", 99)), strict=True)
    assert (record.id, record.object, record.model_extra["max_model_len"]) == ("m", "model", 99)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequestError("bad", "n"), 400, "invalid_request_error", "invalid_value"),
        (ContextLengthError("long"), 400, "invalid_request_error", "context_length_exceeded"),
        (ModelNotFoundError("who", "model"), 404, "invalid_request_error", "model_not_found"),
        (BodyTooLargeError("big"), 413, "invalid_request_error", "request_too_large"),
        (OverloadedError("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (NoWorkerError("x"), 503, "server_error", "no_worker_available"),
        (RequestFailedError("x"), 500, "server_error", "internal_error"),
        (ChannelError("x"), 500, "server_error", "internal_error"),
        (ZeroDivisionError("x"), 500, "server_error", "internal_error"),
        (HTTPException(404), 404, "invalid_request_error", "not_found"),
        (HTTPException(405), 405, "invalid_request_error", "method_not_allowed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_exception_has_openais_error_object(error, status, kind, code):
    found = describe(error)
    assert found.status == status
    body = json.loads(found.body("r-1"))["error"]
    assert set(body) == {"message", "type", "param", "code", "request_id"}
    assert (body["type"], body["code"]) == (kind, code)


@pytest.mark.parametrize(
    "error_type", [RequestFailedError, NoWorkerError, OverloadedError, ChannelError, ValueError]
)
def test_what_happened_inside_is_not_shown(error_type):
    secret = "tcp://10.0.0.1:4000 /root/model.py line 5"
    assert secret not in describe(error_type(secret)).body("r-1").decode()


def test_overload_and_absence_say_when_to_try_again():
    assert describe(OverloadedError("x", retry_after_s=3.4)).headers == {"Retry-After": "3"}
    assert describe(OverloadedError("x", retry_after_s=0.1)).headers == {"Retry-After": "1"}
    assert int(describe(NoWorkerError("x")).headers["Retry-After"]) >= 1
