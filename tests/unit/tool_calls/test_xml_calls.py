"""Calls whose arguments are elements: values as the function's schema has them, as they come."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from pagewire.shared.grammar.limits import parser_limits
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.events import CallArguments, CallBegin, CallEnd, ContentText
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.grammar import AllowedCalls, tools_grammar
from pagewire.shared.tool_calls.written_values import ValueForm, parameter_forms
from pagewire.shared.tool_calls.xml_calls import MAX_TAG, XmlCall
from pagewire.tests.support.growth import grows_in_proportion
from pagewire.tests.support.tool_answers import calls_of, content_of, parsed, parser, splits
from pagewire.tests.unit.tool_calls.test_tool_grammar import EOS, VOCABULARIES

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "items": {"type": "array"},
        "flag": {"type": "boolean"},
        "maybe": {"type": ["string", "null"]},
        "size": {"enum": ["s", "m"]},
        "at": {"$ref": "#/$defs/place"},
        "any": {},
    },
    "$defs": {"place": {"type": "object"}},
}
FUNCTION = Function("f", parameters=SCHEMA)
FORMS = {"f": parameter_forms(FUNCTION)}
FORM = "qwen3_coder"


def call(inner: str) -> str:
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


def element(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def read(text: str, parts: list[str] | None = None) -> tuple[str, str]:
    """Return the arguments of the calls in a text, and its content."""
    events = parsed(parser(FORM, ["f"], forms=FORMS), parts or [text])
    arguments = [event.text for event in events if isinstance(event, CallArguments)]
    return "".join(arguments), content_of(events)


def test_the_schema_says_what_is_text() -> None:
    forms = FORMS["f"]
    assert {name: forms.of(name) for name in forms.named} == {
        "text": ValueForm(others=()),
        "count": ValueForm(any_text=False, others=("number",)),
        "items": ValueForm(any_text=False, others=("array",)),
        "flag": ValueForm(any_text=False, others=("boolean",)),
        "maybe": ValueForm(others=("null",)),
        "size": ValueForm(any_text=False, texts=("s", "m"), others=()),
        "at": ValueForm(any_text=False, others=("object",)),
        "any": ValueForm(),
    }


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("", {}),
        (element("text", "5"), {"text": "5"}),
        (element("text", '"5"'), {"text": '"5"'}),
        (element("text", "a\n\n<b>\n</function>"), {"text": "a\n\n<b>\n</function>"}),
        (element("text", "<tool_call>\n"), {"text": "<tool_call>\n"}),
        (element("text", "\n"), {"text": "\n"}),
        (element("text", ""), {"text": ""}),
        ("<parameter=text></parameter>", {"text": ""}),
        ("<parameter=text>\n</parameter>", {"text": ""}),
        ("<parameter=text>a</parameter><parameter=count>5</parameter>", {"text": "a", "count": 5}),
        (element("count", " 5 "), {"count": 5}),
        (element("count", "five"), {"count": "five"}),
        (element("count", "5 or 6"), {"count": "5 or 6"}),
        (element("flag", "True") + element("any", "None"), {"flag": True, "any": None}),
        (element("items", "[1, {'a': '</b>'}]"), {"items": [1, {"a": "</b>"}]}),
        (element("at", '{\n  "x": "</parameter>"\n}'), {"at": {"x": "</parameter>"}}),
        (element("maybe", "null"), {"maybe": None}),
        (element("maybe", '"x"'), {"maybe": '"x"'}),
        (element("more", "07") + element("other", "7"), {"more": "07", "other": "7"}),
        (element("text", "Łódź \\ \x01"), {"text": "Łódź \\ \x01"}),
    ],
)
@given(data=st.data())
def test_values(data: st.DataObject, inner: str, expected: dict[str, Any]) -> None:
    text = call(inner)
    arguments, content = read(text, data.draw(splits(text)))
    assert (json.loads(arguments), content) == (expected, "")


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ("<tool_call>\n<function=f>\n</tool_call> b", "{}", " b"),
        (call(element("text", "a")) + "\n" + call(element("text", "b")), None, ""),
        ("<tool_call><function=f><parameter=text>\nOsl", '{"text": "Osl', ""),
        ("<tool_call><function=f><parameter=text>\nOslo\n</para", '{"text": "Oslo\\n</para', ""),
        ("<tool_call><function=f><parameter=count>\n12", '{"count": ', ""),
        ("<tool_call><function=f><parameter=items>\n[1, 2", '{"items": [1,2', ""),
        ("<tool_call><function=f><parameter=items>\n[1,}", '{"items": [1', ",}"),
        ("<tool_call><function=f><param", "{", ""),
        ("<tool_call><function=f>\nSo.", "{", "So."),
        ("<tool_call><function=other></function></tool_call>", "", None),
        ("<tool_call>\n<function=f", "", None),
        ("<tool_call>f()</tool_call>", "", None),
        (f"<tool_call><function=f><parameter={'a' * MAX_TAG}", "{", None),
    ],
)
@given(data=st.data())
def test_answers_that_are_cut_or_wrong(
    data: st.DataObject, text: str, arguments: str | None, content: str | None
) -> None:
    found = read(text)
    assert read(text, data.draw(splits(text))) == found
    if arguments is not None:
        assert found[0] == arguments
    if content is not None or not arguments:
        assert found[1] == (text if content is None else content)


def test_arguments_come_as_they_are_written() -> None:
    reader = parser(FORM, ["f"], forms=FORMS)
    assert reader.push("a <tool_call>\n<functi") == [ContentText("a")]
    assert reader.push("on=f>\n<para") == [CallBegin(0, "id-0", "f"), CallArguments(0, "{")]
    assert reader.push("meter=text>\nLine") == [CallArguments(0, '"text": "Line')]
    assert reader.push(' "1"\n') == [CallArguments(0, ' \\"1\\"')]
    assert reader.push("2\n</parameter>\n") == [CallArguments(0, '\\n2"')]
    assert reader.push("</function>") == [CallArguments(0, "}"), CallEnd(0)]
    assert reader.push("\n</tool_call>") == reader.flush() == []


@pytest.mark.parametrize("name", ["text", "items", "any"])
def test_long_values_take_time_in_proportion(name: str) -> None:
    begin = f"<function=f>\n<parameter={name}>\n"

    def run(pushes: int) -> None:
        reader = XmlCall(["f"], FORMS)
        reader.push(begin + ("[" if name == "items" else ""))
        for _ in range(pushes):
            reader.push("1,  ")
        assert not reader.has_failed

    assert grows_in_proportion(run, 64_000)


def allows(parameters: dict[str, Any], inner: str) -> bool:
    tokenizer, ids = VOCABULARIES["added"]
    functions = (Function("f", parameters={"type": "object", **parameters}),)
    wanted = AllowedCalls(functions=functions, must_call=True, only_one=True)
    text = tools_grammar(TOOL_FORMATS[FORM], wanted, None, "outside", ids)
    limits = parser_limits(tokenizer.vocab_size)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(call(inner), parse_special=True)
    return matcher.consume_tokens([*tokens, EOS])


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["", "a\n\nb", '{"a"'], ["a</parameter>b", "</parameter>"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "Łód"], ["a", "abcd", ""]),
        ({"type": "string", "pattern": "^[a-z]+/[0-9]$"}, ["a/1"], ["a/", "A/1", "xa/1x"]),
        ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
        ({"type": "string", "pattern": r"^a\/[^\/]$"}, ["a/1"], ["a/", "a//"]),
        ({"type": "string", "pattern": r"^1\$"}, ["1$", "1$0"], ["1"]),
        ({"type": "string", "pattern": "^a\nb$"}, ["a\nb"], ["ab"]),
        ({"type": "string", "pattern": "^$"}, [""], ["a"]),
        ({"type": "string", "pattern": r"\w{3,}\W\w{3,}"}, ["abc def", "a abc/def"], ["ab cde"]),
        (
            {"type": "string", "pattern": r"^\S+(\s+\S+){0,20}$", "maxLength": 1000},
            ["a", "a b c"],
            ["", " a", "a\n</parameter>\nb"],
        ),
        # ASCII alone, as in ECMAScript.
        ({"type": "string", "pattern": r"^\d\w\W$"}, ["1aé", "1_ "], ["\u0661aé", "1éé", "1a1"]),
        (
            {"type": "string", "pattern": r"^[\d.-]+[^\W\d]\D$"},
            ["1.ab"],
            ["\u0661aa", "1éa", "1aa1"],
        ),
        ({"type": "string", "pattern": r"^\\d[\w-]$"}, [r"\d-"], ["1-"]),
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ["a", "aa"], ["aaa", "b"]),
        ({"enum": ["a", 'b"\n']}, ["a", 'b"\n'], ["c", ""]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"type": "integer", "minimum": 3}, ["3"], ["2", "three", '"3"']),
        ({"type": ["string", "null"]}, ["null", "x"], []),
        ({"$ref": "#/$defs/n"}, ["1"], ["x"]),
    ],
)
def test_values_follow_their_schemas(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    parameters = {
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"n": {"type": "integer"}},
    }
    for value in right:
        assert allows(parameters, element("a", value)), value
    for value in wrong:
        assert not allows(parameters, element("a", value)), value
    assert not allows(parameters, "")


def test_parameters_come_in_the_schemas_order_and_undeclared_ones_where_they_may() -> None:
    two = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    assert allows(two, element("a", "x") + element("b", "y"))
    assert allows(two, element("b", "y"))
    assert allows(two, "")
    assert not allows(two, element("c", "y"))
    assert allows({"additionalProperties": True}, element("c", "y") + element("d", "5"))


def test_calls_are_read_with_the_kinds_of_their_functions() -> None:
    events = parsed(parser(FORM, ["f"], forms=FORMS), [call(element("count", "1")) * 2])
    assert calls_of(events) == [("f", {"count": 1})] * 2
