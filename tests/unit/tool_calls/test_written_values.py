"""Values as calls have them: read by the function's schema, and back as they were written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.template_fixes import write_calls
from pagewire.shared.tool_calls.written_values import NULLS, parameter_forms
from pagewire.tests.support.tool_answers import VALUES, calls_of, content_of, parsed, parser, splits

FORMATS = sorted({*TOOL_FORMATS} - {"harmony"})
TEXT, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
LIST = {"type": "array", "items": TEXT}
DEFINITIONS = {"text": TEXT, "or null": {"anyOf": [{"$ref": "#/$defs/text"}, NULL]}}


def read(schema: Any, written: str, parts: st.DataObject | None = None) -> Any:
    """Return the value of an argument that qwen3_coder has written."""
    parameters = {"properties": {"a": schema}, "$defs": DEFINITIONS}
    forms = {"f": parameter_forms(Function("f", parameters=parameters))}
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>"
    pieces = [text] if parts is None else parts.draw(splits(text))
    events = parsed(parser("qwen3_coder", ["f"], forms=forms), pieces)
    ((_, arguments),) = calls_of(events)
    assert content_of(events) == ""
    return arguments["a"]


OR_NULL: list[Any] = [
    {"anyOf": [TEXT, NULL]},
    {"oneOf": [NULL, TEXT]},
    {"type": ["string", "null"]},
    {"type": "string", "nullable": True},
    {"$ref": "#/$defs/or null"},
    {"anyOf": [{"$ref": "#/$defs/text"}, {"const": None}]},
    {"allOf": [{"type": ["string", "null"]}, {"description": "d"}]},
    {"type": ["string", "null"], "enum": None},
]


@pytest.mark.parametrize("schema", OR_NULL, ids=json.dumps)
@settings(max_examples=20)
@given(data=st.data())
def test_text_or_null(data: st.DataObject, schema: Any) -> None:
    for text in ("12345", "true", "-1.5e3", "[1]", '{"a": 1}', '"x"', "", "nullable", "no", " n"):
        assert read(schema, text, data) == text
    for word in ("null", "None", " null "):
        assert read(schema, word, data) is None


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (TEXT, "null", "null"),
        (TEXT, "  x\n", "  x\n"),
        ({"const": "12"}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 1, 2]}, "1", "1"),
        ({"enum": ["1", 1, 2]}, "2", 2),
        ({"enum": ["a", None]}, "null", None),
        ({"enum": ["a", True]}, "true", True),
        ({"enum": ["[a]", [1]]}, "[a]", "[a]"),
        ({"enum": ["[a]", [1]]}, "[1]", [1]),
        ({"anyOf": [{"const": "all"}, INTEGER]}, "5", 5),
        ({"anyOf": [{"const": "all"}, INTEGER]}, "all", "all"),
        ({"type": ["string", "boolean"]}, "true", "true"),
        ({"type": ["string", "integer"]}, "12345", "12345"),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": ["boolean", "null"]}, "True", True),
        ({"anyOf": [TEXT, LIST]}, '["a"]', ["a"]),
        ({"anyOf": [TEXT, LIST]}, ' ["</parameter>"] ', ["</parameter>"]),
        ({"anyOf": [TEXT, LIST]}, '["a"] and', '["a"] and'),
        ({"anyOf": [TEXT, LIST]}, "[note] x", "[note] x"),
        ({"anyOf": [TEXT, LIST]}, "[1, 2", "[1, 2"),
        ({"anyOf": [TEXT, LIST]}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
        ({}, "12345", "12345"),
        ({}, "[1]", [1]),
        ({}, "null", None),
        (True, "true", "true"),
        ({"$ref": "#/$defs/text"}, "5", "5"),
        (INTEGER, "five", "five"),
        (INTEGER, " 5 ", 5),
        ({"type": "surprise"}, "5", 5),
    ],
    ids=str,
)
@settings(max_examples=20)
@given(data=st.data())
def test_values_are_read_by_the_schema(
    data: st.DataObject, schema: Any, written: str, value: Any
) -> None:
    found = read(schema, written, data)
    assert (found, type(found)) == (value, type(value))


def test_text_comes_as_it_is_written_where_it_may_be_null() -> None:
    forms = {"f": parameter_forms(Function("f", parameters={"properties": {"a": OR_NULL[0]}}))}
    reader = parser("qwen3_coder", ["f"], forms=forms)
    reader.push("<tool_call>\n<function=f>\n<parameter=a>\n")
    assert reader.push("nul") == []
    assert [event.text for event in reader.push("l and more")] == []  # may only be the word
    reader = parser("qwen3_coder", ["f"], forms=forms)
    reader.push("<tool_call>\n<function=f>\n<parameter=a>\n")
    assert [getattr(event, "text", "") for event in reader.push("Line")] == ['"Line']


def test_a_repeated_parameter_has_its_first_value() -> None:
    elements = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in (("a", "1"), ("a", "[2]"), ("b", "3"), ("a", "4"))
    )
    text = f"<tool_call>\n<function=f>\n{elements}</function>\n</tool_call>"
    for parts in ([text], list(text)):
        assert calls_of(parsed(parser("qwen3_coder", ["f"]), parts)) == [
            ("f", {"a": "1", "b": "3"})
        ]


def schemas_and_values() -> st.SearchStrategy[tuple[Any, Any]]:
    """Schemas, and values that they allow."""
    texts = st.text(max_size=8) | st.sampled_from(["12345", "true", "null", "None", "[1]", "", " "])
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "string": texts,
        "number": numbers,
        "boolean": st.booleans(),
        "null": st.none(),
        "array": st.lists(VALUES, max_size=3),
        "object": st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    }

    @st.composite
    def drawn(draw: st.DrawFn) -> tuple[Any, Any]:
        names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3, unique=True))
        value = draw(kinds[draw(st.sampled_from(names))])
        each = [{"type": name} for name in names]
        ways: list[Any] = [{"type": names}, {"anyOf": each}, {"allOf": [{"oneOf": each}]}]
        if value is None or isinstance(value, str | bool | int):
            ways += [{"const": value}, {"enum": ["x", value]}, {"enum": [value], "type": names}]
        return draw(st.sampled_from(ways)), value

    return drawn()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(arguments=st.dictionaries(st.sampled_from("abc"), schemas_and_values()), data=st.data())
def test_what_a_format_writes_comes_back(
    name: str, arguments: dict[str, tuple[Any, Any]], data: st.DataObject
) -> None:
    """A prompt has the calls of earlier answers; a model that repeats them says the same."""
    form = TOOL_FORMATS[name]
    parameters = {"properties": {key: schema for key, (schema, _) in arguments.items()}}
    values = {key: value for key, (_, value) in arguments.items()}
    forms = {"f": parameter_forms(Function("f", parameters=parameters))}
    if form.kind == "xml":
        for key, value in values.items():
            assume(is_told_apart(value, forms["f"].of(key).any_text, forms["f"].of(key).others))
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": values}}
    text = write_calls(form, [call])
    events = parsed(parser(form, ["f"], forms=forms), data.draw(splits(text)))
    assert calls_of(events) == [("f", values)]
    assert content_of(events) == ""


def is_told_apart(value: Any, any_text: bool, others: tuple[str, ...]) -> bool:
    """Whether no other value that the schema allows is written in the same way."""
    if not isinstance(value, str):
        return not any_text or value is None or isinstance(value, list | dict)
    is_word = "null" in others and value.strip() in NULLS
    is_json = value.strip()[:1] in ("[", "{") and not {"array", "object"}.isdisjoint(others)
    return not (is_word or is_json or "</parameter>" in value)
