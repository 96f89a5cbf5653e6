"""Schemas that share definitions, in each format: what is allowed, how large grammars become."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.request.structured_outputs import MAX_GRAMMAR_CHARS
from pagewire.shared.tool_calls.definitions import Function, Tool, check_tools
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.grammar import AllowedCalls
from pagewire.shared.tool_calls.harmony_grammar import channels_grammar
from pagewire.shared.tool_calls.written_values import ANY_VALUE, ValueForm, parameter_forms
from pagewire.tests.support.costly_schemas import SCHEMAS
from pagewire.tests.support.growth import grows_in_proportion
from pagewire.tests.unit.tool_calls.test_tool_grammar import FORMATS, Allowed, calls_in

# Formats in which each argument has a rule of its own.
ONE_BY_ONE = sorted(name for name, form in TOOL_FORMATS.items() if form.kind in ("python", "xml"))
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/tree"}, "at": {"$ref": "#/$defs/place"}},
    "additionalProperties": False,
}
A = {"x": 1}

# Schema of an argument, definitions and other keywords, values that follow the schema, and others.
CASES: dict[str, tuple[Any, dict[str, Any], list[Any], list[Any]]] = {
    "plain": ({"$ref": "#/$defs/place"}, {"$defs": {"place": PLACE}}, [A], [{"x": "1"}, [A]]),
    "older": ({"$ref": "#/definitions/p"}, {"definitions": {"p": PLACE}}, [A], [{}]),
    "in lists": (
        {"type": "array", "items": {"$ref": "#/$defs/place"}},
        {"$defs": {"place": PLACE}},
        [[], [A, A]],
        [A, [{"x": "1"}]],
    ),
    "or null": (
        {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}], "default": None},
        {"$defs": {"place": PLACE}},
        [A],
        [{"x": None}],
    ),
    "in maps": (
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/place"}},
        {"$defs": {"place": PLACE}},
        [{}, {"a": A, "b": A}],
        [{"a": 1}],
    ),
    "with itself": (
        {"$ref": "#/$defs/tree"},
        {"$defs": {"tree": TREE, "place": PLACE, "other": {"type": "string"}}},
        [{}, {"left": {"left": {"at": A}}, "at": A}],
        [{"left": 1}, {"left": {"at": {}}}],
    ),
    "with one another": (
        {"$ref": "#/$defs/a"},
        {
            "$defs": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
                "b": {
                    "type": "object",
                    "properties": {"a": {"$ref": "#/$defs/a"}},
                    "additionalProperties": False,
                },
            }
        },
        [[], [{"a": [{}]}]],
        [[[]], [{"a": {}}]],
    ),
    "in a definition": (
        {"$ref": "#/$defs/outer/properties/inner"},
        {"$defs": {"outer": {"properties": {"inner": PLACE}}}},
        [A],
        [{}],
    ),
    "of another argument": (
        {"type": "array", "items": {"$ref": "#/properties/other"}},
        {"properties": {"other": PLACE}},
        [[A]],
        [[1]],
    ),
    "with escapes": (
        {"type": "array", "items": {"$ref": "#/$defs/a~1b%20~0c"}},
        {"$defs": {"a/b ~c": PLACE}},
        [[A]],
        [[1]],
    ),
    "in an annotation": (
        {"type": "array", "items": {"$ref": "#/properties/value/default/0"}, "default": [PLACE]},
        {},
        [[A]],
        [[1]],
    ),
    "by an anchor": (
        {"type": "array", "items": {"$ref": "#here"}},
        {"$defs": {"place": PLACE | {"$anchor": "here"}}},
        [[A]],
        [[1]],
    ),
    "by a name": (
        {"type": "array", "items": {"$ref": "https://example.com/place"}},
        {"$defs": {"place": PLACE | {"$id": "https://example.com/place"}}},
        [[A]],
        [[1]],
    ),
    "with descriptions": (
        {"$ref": "#/$defs/p", "description": "d", "title": "t", "examples": [1], "default": 1},
        {"$defs": {"p": PLACE | {"description": "d", "$comment": "c", "examples": [2]}}},
        [A],
        [1, {}],
    ),
}


def function(schema: Any, others: dict[str, Any], strict: bool | None = None) -> Function:
    properties = {"value": schema, **others.get("properties", {})}
    parameters = {"type": "object", "required": ["value"], **others, "properties": properties}
    return Function("f", parameters=parameters, strict=strict)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_references_are_followed(form: str, case: str) -> None:
    schema, others, right, wrong = CASES[case]
    allowed = Allowed(form, functions=(function(schema, others),))
    for values, expected in ((right, True), (wrong, False)):
        for value in values:
            assert allowed.allows(calls_in(form, [("f", {"value": value})])) == expected, value


@pytest.mark.parametrize("form", FORMATS)
def test_a_reference_to_the_whole_is_to_the_functions_schema(form: str) -> None:
    schema = {"type": "array", "items": {"$ref": "#"}}
    allowed = Allowed(form, functions=(function(schema, {}),))
    assert allowed.allows(calls_in(form, [("f", {"value": [{"value": [{"value": []}]}]})]))
    for wrong in ([[]], [{}], [{"value": 1}], [{"value": [], "more": 1}]):
        assert not allowed.allows(calls_in(form, [("f", {"value": wrong})])), wrong


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("strict", [None, True])
def test_definitions_may_be_an_arguments_own(form: str, strict: bool | None) -> None:
    """As where a whole schema with definitions is put in the place of an argument's."""
    schema = {"type": "array", "items": {"$ref": "#/$defs/p"}, "$defs": {"p": PLACE}}
    given = function(schema, {"$defs": {"q": {"type": "string"}}}, strict)
    check_tools([Tool("function", given)], "auto")
    allowed = Allowed(form, functions=(given,))
    assert allowed.allows(calls_in(form, [("f", {"value": [A]})]))
    assert not allowed.allows(calls_in(form, [("f", {"value": ["a"]})]))


@pytest.mark.parametrize("form", FORMATS)
def test_definitions_of_the_whole_schema_come_first(form: str) -> None:
    """As JSON Schema has it, and so programs that check arguments."""
    schema = {"type": "array", "items": {"$ref": "#/$defs/p"}, "$defs": {"p": {"type": "string"}}}
    allowed = Allowed(form, functions=(function(schema, {"$defs": {"p": PLACE}}),))
    assert allowed.allows(calls_in(form, [("f", {"value": [A]})]))
    assert not allowed.allows(calls_in(form, [("f", {"value": ["a"]})]))


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_equal_arguments_share_one_rule_and_have_what_they_need(form: str) -> None:
    definitions = {
        "place": PLACE | {"description": "long"},
        "place2": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "other": {"enum": [5, 6, 7]},
    }
    uses = [{"$ref": f"#/$defs/{name}", "description": "a use"} for name in ("place", "place2")]
    parameters = {
        "type": "object",
        "properties": {f"p{number}": uses[number % 2] for number in range(100)},
        "$defs": definitions,
    }
    functions = tuple(Function(f"f{number}", parameters=parameters) for number in range(3))
    text = Allowed(form, functions=functions).text
    assert text.count("%json") == 2
    assert text.count('"x":') == 2
    assert "description" not in text and "enum" not in text


def grammar_of(form: str, functions: tuple[Function, ...]) -> str:
    if form != "harmony":
        return Allowed(form, functions=functions).text
    return channels_grammar(
        AllowedCalls(functions=functions, must_call=True, only_one=True), "outside", {}
    )


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_a_grammar_that_becomes_too_large_is_refused_with_the_functions_name(form: str) -> None:
    sizes = [MAX_GRAMMAR_CHARS // 2 + 100 * number for number in range(12)]
    schemas = map(SCHEMAS["long_enum"], sizes)
    functions = tuple(Function(f"f{i}", parameters=schema) for i, schema in enumerate(schemas))
    assert grammar_of(form, functions[:2])
    with pytest.raises(InvalidRequestError) as caught:
        grammar_of(form, functions)
    assert caught.value.param == "tools"
    assert re.fullmatch(
        r"tools: arguments_(\d)_f\1: the grammar becomes too large: at most 131072 characters are "
        "possible",
        caught.value.message,
    )


@pytest.mark.parametrize("kind", ["fan_to_itself", "fans"])
def test_alternatives_that_refer_to_one_another_are_read_in_proportion(kind: str) -> None:
    def read(size: int) -> None:
        parameter_forms(Function("f", parameters=SCHEMAS[kind](size)))

    assert grows_in_proportion(read, 1 << 18)


def test_how_arguments_are_written_is_found_through_references() -> None:
    parameters = {
        "properties": {
            "text": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b~1c"}]},
            "json": {"$ref": "#/$defs/d/anyOf/1"},
            "both": {"$ref": "#/$defs/d"},
            "loop": {"$ref": "#/$defs/loop"},
            "none": {"$ref": "#/$defs/none"},
        },
        "$defs": {
            "a": {"$ref": "#/$defs/b~1c"},
            "b/c": {"type": "string"},
            "d": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
        },
    }
    forms = parameter_forms(Function("f", parameters=parameters))
    assert {name: forms.of(name) for name in forms.named} == {
        "text": ValueForm(others=()),
        "json": ValueForm(any_text=False, others=("number",)),
        "both": ValueForm(others=("number",)),
        "loop": ValueForm(others=()),
        "none": ANY_VALUE,
    }
