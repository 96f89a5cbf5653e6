"""The bodies of requests: bounds of lists, what errors say, fields that nobody knows."""

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.router.http.api.openai.generation import read_chat, read_completion
from pagewire.services.router.http.api.openai.schemas import (
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PARTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatBody,
    CompletionBody,
    parse_body,
)
from pagewire.services.router.http.api.responses.inputs import with_history
from pagewire.services.router.http.api_errors import describe
from pagewire.services.router.http.body_processes.body_messages import BodyKind
from pagewire.services.router.http.body_processes.body_process import read_body
from pagewire.services.router.http.unsupported import REFUSED_IN_CHATS, REFUSED_IN_COMPLETIONS
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request.sampling_types import MAX_STOP_TOKEN_IDS
from pagewire.tests.support.examples import MANY_EXAMPLES
from pagewire.tests.support.request_bodies import (
    CONTEXT,
    MODEL,
    chat,
    completion,
    encoded,
    refusal,
)

PART = {"type": "text", "text": "a"}
MESSAGE = {"role": "user", "content": "a"}


def parts(count):
    return [{"role": "user", "content": [PART] * count}]


@pytest.mark.parametrize(
    ("kind", "field", "most", "too_many"),
    [
        (ChatBody, "messages", [MESSAGE] * MAX_MESSAGES, [MESSAGE] * (MAX_MESSAGES + 1)),
        (ChatBody, "messages", parts(MAX_PARTS), parts(MAX_PARTS + 1)),
        (ChatBody, "stop", ["x"] * MAX_STOPS, ["x"] * (MAX_STOPS + 1)),
        (ChatBody, "stop", "x" * MAX_STOP_CHARS, "x" * (MAX_STOP_CHARS + 1)),
        (
            ChatBody,
            "stop_token_ids",
            [1] * MAX_STOP_TOKEN_IDS,
            [1] * (MAX_STOP_TOKEN_IDS + 1),
        ),
        (
            CompletionBody,
            "metadata",
            {str(i): "" for i in range(MAX_METADATA)},
            {str(i): "" for i in range(MAX_METADATA + 1)},
        ),
    ],
    ids=["messages", "parts", "stop strings", "stop string", "stop tokens", "metadata"],
)
def test_lists_are_bounded(kind, field, most, too_many):
    base = {"model": "m", "prompt": "Hi", "messages": [MESSAGE]}
    assert parse_body(kind, encoded(base | {field: most}))
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(kind, encoded(base | {field: too_many}))
    assert caught.value.param is not None and caught.value.param.startswith(field)
    assert len(caught.value.message) < 300


def test_a_list_of_token_ids_is_bounded_by_the_context():
    assert completion(prompt=[5] * (CONTEXT - 1), max_tokens=1)
    for prompt in ([5] * 1_000_000, [[5], [5] * 1_000_000]):
        assert describe(refusal(completion, prompt=prompt)).code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("call", "asked", "message"),
    [
        (chat, {"n": 129}, "n must be an integer from 1 to 128, not 129"),
        (chat, {"n": "2"}, "n must be an integer from 1 to 128, not '2'"),
        (chat, {"stream": "yes"}, "stream must be a boolean, not 'yes'"),
        (
            chat,
            {"stop": 5},
            "stop must be a string of 1 to 256 characters or a list of at most 16 strings of 1 to "
            "256 characters, not 5",
        ),
        (chat, {"stop": ["a", ""]}, "stop[1] must be a string of 1 to 256 characters, not ''"),
        (
            chat,
            {"temperature": 10**400},
            f"temperature must be a number between 0 and 100, not 1{'0' * 49}...",
        ),
        (
            chat,
            {"stop_token_ids": [1] * 3_000},
            f"stop_token_ids must be a list of at most 64 token ids, not [{'1, ' * 16}1...",
        ),
        (chat, {"messages": []}, "messages must be a list of 1 to 4096 messages, not []"),
        (
            chat,
            {"messages": [MESSAGE, {"role": "function", "content": "x"}]},
            "messages[1].role must be one of assistant, developer, system, tool, user, "
            "not 'function'",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [PART, {"type": "image_url"}]}]},
            "messages[0].content[1]: images are not supported, only text is",
        ),
        (
            chat,
            {"messages": [MESSAGE | {"tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function is required",
        ),
        (chat, {"stream": True, "stream_options": 1}, "stream_options must be an object, not 1"),
        (
            completion,
            {"prompt": [5.0]},
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids, none of them empty, not [5.0]",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_field_what_is_right_and_what_is_wrong(call, asked, message):
    assert refusal(call, **asked).message == message


def test_fields_that_nobody_knows_are_counted_and_known_ones_are_not():
    assert completion().unknown_fields == chat().unknown_fields == 0
    for call in (completion, chat):
        unknown = {f"x{number}": [{"a": number}] for number in range(300)}
        assert call(**unknown, user="somebody", min_p=0, best_of=1).unknown_fields == (
            300 if call is completion else 301  # a chat has no best_of
        )


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_a_field_is_declared_once(kind):
    refused = REFUSED_IN_CHATS if kind is ChatBody else REFUSED_IN_COMPLETIONS
    assert refused.keys() & set(kind.__struct_fields__) <= {"best_of"}


@pytest.mark.parametrize(
    "value", ["[1e999]", '"\\ud800"', "1e999", "{" + '"a":{' * 20 + "}" * 21, "-" + "9" * 200]
)
def test_a_value_that_cannot_be_shown_or_compared_is_refused_by_its_field(value):
    for field in ("logit_bias", "temperature", "n", "prompt"):
        raw = b'{"model": "m", "prompt": "Hi", "%s": %s}' % (field.encode(), value.encode())
        with pytest.raises(InvalidRequestError):
            read_completion(raw, MODEL)


@pytest.mark.parametrize("last", ["[]", "[3]", "[{}]", "7", "null"])
def test_a_wrong_field_that_comes_twice_is_refused(last):
    raw = f'{{"model": "m", "messages": [{{"role": "x"}}], "messages": {last}}}'
    with pytest.raises(InvalidRequestError) as caught:
        read_chat(raw.encode(), MODEL)
    assert caught.value.param == "messages[0].role"


SAID = '"messages": [{"role": "user", "content": "Hi"}]'
VARIABLES = '"chat_template_kwargs": {"a": DEEP}'
CALL = '{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\\"a\\": DEEP}"}'
USE = '{"type": "tool_use", "id": "a", "name": "f", "input": {"a": DEEP}}'
TOOL = '{"name": "f", "input_schema": {"properties": DEEP}}'
NESTED = [
    ("completion", '"prompt": "Hi", "x": DEEP'),
    ("completion", '"prompt": "Hi", "stop": DEEP'),
    ("completion", '"prompt": DEEP'),
    ("completion", '"model": 5, "prompt": DEEP'),
    ("chat", f"{SAID}, {VARIABLES}"),
    ("tokenize", f"{SAID}, {VARIABLES}"),
    ("embedding", '"input": DEEP'),
    ("response", f'"input": "Hi", {VARIABLES}'),
    (
        "response",
        '"input": "Hi", "text": {"format": {"type": "json_schema", "schema": {"a": DEEP}}}',
    ),
    ("response count", f'"input": [{CALL}]'),
    ("message", f'"max_tokens": 1, {SAID}, "tools": [{TOOL}], "tool_choice": {{"type": "none"}}'),
    ("message count", f'"messages": [{{"role": "assistant", "content": [{USE}]}}, {SAID[13:-1]}]'),
]


@pytest.mark.parametrize(("kind", "fields"), NESTED)
def test_a_body_nested_to_any_depth_is_read_or_refused(kind: BodyKind, fields: str) -> None:
    """Also where it is within the reach of the decoder, and not of what comes after that."""
    limit, refused = sys.getrecursionlimit(), set()
    # From Python 3.12 on, a decoder in C may go deeper: down to 10,000.
    for depth in (*range(limit - 150, limit + 1), *range(9_850, 10_001, 10), 20_000):
        raw = f'{{"model": "m", {fields.replace("DEEP", "[" * depth + "]" * depth)}}}'.encode()
        body = with_history(raw, b"") if kind.startswith("response") else raw
        try:
            read_body(kind, body, MODEL)
        except InvalidRequestError as exc:
            refused.add(exc.message)
    assert any(
        "is nested too deeply" in message or "must be a JSON object" in message
        for message in refused
    )


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("completion", r'"prompt": "a\ud800b"', "prompt"),
        ("completion", r'"prompt": "a\uDC00b"', "prompt"),
        ("completion", r'"prompt": ["\ud83d\ude00", "a\ud83d\u0041"]', "prompt[1]"),
        ("completion", r'"prompt": "Hi", "stop": "\\\ud800"', "stop"),
        ("completion", r'"prompt": "Hi", "guided_json": {"\ud800": 1}', "guided_json"),
        ("completion", r'"prompt": "Hi", "guided_json": "[\"\\ud800\"]"', "guided_json"),
        ("completion", r'"prompt": "\udfff", "prompt": "the last one counts"', "prompt"),
        ("chat", r'"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]',
         "messages[0].content[0].text"),
        ("chat", r'"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", '
         r'"function": {"name": "f", "unheard_of": "\ud800"}}]', "tools[0].function.unheard_of"),
        ("message", r'"messages": [{"role": "user", "content": "\ud800"}]', "messages[0].content"),
        ("response", r'"input": [{"role": "user", "content": "\ud800"}]', "input[0].content"),
        ("embedding", r'"input": ["a", "\ud800"]', "input[1]"),
        ("tokenize", r'"prompt": "\ud800"', "prompt"),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair_is_called_so(kind, fields, param):
    raw = f'{{"model": "m", "max_tokens": 5, {fields}}}'.encode()
    says = rf"^{re.escape(param)}: .*\\u[0-9a-f]{{4}} is half of a surrogate pair: "
    with pytest.raises(InvalidRequestError, match=says) as caught:
        read_body(kind, with_history(raw, b"") if kind == "response" else raw, MODEL)
    assert caught.value.param == param


def test_what_only_looks_like_half_of_a_surrogate_pair_is_taken():
    raw = rb'{"model": "m", "prompt": "\\ud800 \ud83d\ude00"}'
    assert read_body("completion", raw, MODEL).prompts
    deep = rb'{"model": "m", "prompt": "\ud800", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    for broken in (raw[:-2], rb'{"model": "m", "prompt": "\ud800', deep):
        with pytest.raises(InvalidRequestError, match="the body is not valid JSON"):
            read_body("completion", broken, MODEL)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *REFUSED_IN_CHATS})


@MANY_EXAMPLES
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=4))
def test_any_value_of_any_field_is_read_or_refused_with_its_name(fields):
    base = {"model": "m", "prompt": "Hi", "messages": [MESSAGE]}
    for read in (read_completion, read_chat):
        try:
            asked = read(encoded(base | fields), MODEL)
        except InvalidRequestError as exc:
            assert describe(exc).status in (400, 404)
            assert exc.param is not None or "not valid JSON" in exc.message
        else:
            assert 1 <= len(asked.prompts) * asked.n <= 64 * 16


@MANY_EXAMPLES
@given(st.data())
def test_any_bytes_are_read_or_refused(data):
    whole = encoded({"model": "m", "prompt": "Hi", "messages": [MESSAGE], "stop": ["a", "b"]})
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    junk = data.draw(st.binary(max_size=6) | JSON.map(lambda value: json.dumps(value).encode()))
    for read in (read_completion, read_chat):
        try:
            read(whole[:start] + junk + whole[end:], MODEL)
        except InvalidRequestError as exc:
            assert describe(exc).status in (400, 404)
