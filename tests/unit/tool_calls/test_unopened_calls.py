"""Calls without the text that opens them, which models forget: calls, and held to their schemas."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.tests.support.tool_answers import (
    as_grammars_have_it,
    calls_of,
    content_of,
    parsed,
    parser,
    splits,
    written,
)
from pagewire.tests.unit.tool_calls.test_tool_grammar import EOS, FORMATS, FUNCTIONS, Allowed

ANYWHERE = sorted(name for name, form in TOOL_FORMATS.items() if form.unopened)
SCHEMAS = {function.name: function.schema for function in FUNCTIONS}
CALL: Any = ("get_weather", {"city": "Oslo", "days": 3})
WRONG: Any = ("get_weather", {"city": "Oslo", "days": 0})


def unopened(name: str, calls: list[Any]) -> str:
    form = TOOL_FORMATS[name]
    return written(form, calls, as_grammars_have_it(form)).removeprefix(form.open)


@pytest.mark.parametrize("name", ANYWHERE)
@settings(max_examples=20)
@given(data=st.data())
def test_they_are_calls(data: st.DataObject, name: str) -> None:
    text = unopened(name, [CALL])
    for before, after in (("", ""), ("\n\n", ""), ("", "\n")):
        answer = before + text + after
        events = parsed(parser(name), data.draw(splits(answer)))
        assert (calls_of(events), content_of(events)) == ([CALL], "")


@pytest.mark.parametrize("name", ANYWHERE)
@settings(max_examples=20)
@given(data=st.data())
def test_and_after_text_where_no_text_begins_like_them(data: st.DataObject, name: str) -> None:
    form = TOOL_FORMATS[name]
    text = f"I look.\n\n{unopened(name, [CALL])}\n"
    events = parsed(parser(name), data.draw(splits(text)))
    assert (calls_of(events), content_of(events)) == ([CALL], "I look.")
    two = f"I look. {unopened(name, [CALL])}{form.open and form.separator}{written(form, [CALL])}"
    events = parsed(parser(name), data.draw(splits(two)))
    assert (calls_of(events), content_of(events)) == ([CALL] * 2, "I look.")


@pytest.mark.parametrize("name", ANYWHERE)
def test_the_grammar_holds_them_to_the_schema(name: str) -> None:
    allowed = Allowed(name, must_call=False)
    right, wrong = unopened(name, [CALL]), unopened(name, [WRONG])
    for before in ("", "I look. "):
        assert allowed.allows(before + right)
        assert not allowed.allows(before + wrong)
    assert not Allowed(name, must_call=True).allows(right)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name":"get_weather", "parameters": {"city": 5}}'),
        ("llama3_json", '{"parameters": {"city": 5}, "name": "get_weather"}'),
        (
            "llama3_json",
            ' {"type": "function", "function": {"name": "clock", "parameters": {"x": 1}}}',
        ),
        ("llama3_json", '{"id": 1, "function" : "clock", "parameters": {"x": 1}}'),
        ("pythonic", "[get_weather (city=5)]"),
        ("pythonic", "[ clock( x=1)]"),
        ("deepseek_v31", '<｜tool▁call▁begin｜> clock<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'),
    ],
)
def test_no_spelling_of_a_call_escapes_the_grammar(name: str, text: str) -> None:
    """What the parser takes for a call, the grammar never takes for text."""
    assert calls_of(parsed(parser(name), [text]))
    assert not Allowed(name, must_call=False).allows(text)
    # As it is before a later call, too.
    assert not Allowed(name, must_call=False).allows(
        f"{text} {written(TOOL_FORMATS[name], [CALL])}"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '{"name": "Bob", "age": 5}'),
        ("hermes", '{"name": "get_weather_now", "arguments": {}}'),
        ("hermes", '{"id": 5, "items": [{"name": "a"}]}'),
        ("hermes", 'Use {"name": "clock", "arguments": {}}.'),
        ("hermes", '{"steps": [{"id": 1, "name": "clock"}, {"id": 2}]}'),
        ("hermes", '{"name": "clock", "description": "tells the time"}'),
        ("hermes", '{"name":"get_weather","arguments":{"city":5}}'),
        ("llama3_json", '{"steps": [{"id": 1, "name": "clock"}, {"id": 2}]}'),
        ("granite", '[{"id": 1, "name": "clock"}, {"id": 2}]'),
        ("mistral", '[{"name": "Bob"}, 5]'),
        ("mistral", "[TOOL_CALLS are special]"),
        ("granite", "[1, 2]"),
        ("mistral_args", "get_weather tells the weather"),
        ("mistral_args", 'clock [ARGS]{"x": 1}'),
        ("qwen3_coder", "A call begins with <function=NAME>, as in <function=other>\n."),
        ("qwen3_coder", "<function"),
        ("qwen3_coder", "To call it, write `<function=clock>` and its parameters."),
        ("qwen3_coder", "It is <function=clock>"),
        ("deepseek_v3", "<｜tool▁call▁begin"),
        ("olmo3", "clock() tells the time"),
        ("tool_code", "get_weather( ) does."),
        ("olmo3", "get_weather(city, days) needs a city."),
        ("olmo3", "clock\n\n(a tool) tells the time"),
        ("smollm3_python", "get_weather is one."),
    ],
)
@settings(max_examples=20)
@given(data=st.data())
def test_what_only_resembles_them_is_text(data: st.DataObject, name: str, text: str) -> None:
    events = parsed(parser(name), data.draw(splits(text)))
    assert (calls_of(events), content_of(events)) == ([], text)
    if name != "mistral":  # whose marker begins a call that must go on
        assert Allowed(name, must_call=False).allows(text)


@pytest.mark.parametrize("name", ANYWHERE)
def test_what_is_cut_before_the_arguments(name: str) -> None:
    """It is content if it could have become text, and is dropped after a certain beginning."""
    form, text = TOOL_FORMATS[name], unopened(name, [CALL])
    for at in range(1, len(text)):
        events = parsed(parser(name), [text[:at]], is_cut=True)
        content = content_of(events)
        has_call = any(hasattr(event, "name") for event in events)
        is_marked = bool(form.unopened) and at >= len(form.unopened)
        assert content == ("" if has_call or is_marked else text[:at])


def test_a_broken_call_after_another_is_read_from_its_beginning() -> None:
    element = "<parameter=city>\nOslo\n</parameter>\n"
    text = f"<function=get_weather>\n{element}<function=clock>\n</function>"
    events = parsed(parser("qwen3_coder"), list(text))
    names = [event.name for event in events if hasattr(event, "name")]
    assert (names, content_of(events)) == (["get_weather", "clock"], "")


PIECES = [
    *("{", "}", "[", "]", '"', ":", ", ", " ", "\n", "(", ")", "=", "\\", "; ", "x", "5", "null"),
    *("<tool_call>\n", "\n</tool_call>", "<function=get_weather>\n", "</function>", "days="),
    *("<parameter=city>\n", "\n</parameter>\n", '"name": ', '"arguments": ', '"tool_name": '),
    *('"get_weather"', "get_weather", "clock", '{"city": 5}', "(city=5)", "(x=1)", "[TOOL_CALLS]"),
    *("<function_calls>", "```tool_code\n", "<|tool_call|>", "<｜tool▁call▁begin｜>", "Action:"),
]


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_grammar_allows_its_calls_follow_their_schemas(name: str) -> None:
    """Calls with parts that are added, taken away or repeated, with their marker and without."""
    form, choose = TOOL_FORMATS[name], random.Random(name)
    allowed = Allowed(name, must_call=False)
    start, num_allowed = allowed.matcher(), 0
    for number in range(60):
        text = written(form, [WRONG if number % 3 else CALL], as_grammars_have_it(form))
        text = text.removeprefix(form.open if number % 2 else "")
        for _ in range(choose.randrange(4)):
            at, kept = choose.randrange(len(text) + 1), choose.randrange(7)
            text = text[:at] + choose.choice(PIECES) * (kept > 2) + text[at + 5 * (kept < 2) :]
        tokens = allowed.tokenizer.tokenize_str(text, parse_special=True)
        if start.deep_copy().consume_tokens([*tokens, EOS]):
            num_allowed += 1
            for function, arguments in calls_of(parsed(parser(name), [text])):
                jsonschema.validate(arguments, SCHEMAS[function])
    assert num_allowed > 5
