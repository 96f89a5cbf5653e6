"""Values that calls in Python have: constants of Python wherever the schema has constants."""

from __future__ import annotations

import ast
import contextlib
from typing import Any

import jsonschema
import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.grammar.references import References
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.formats import TOOL_FORMATS
from pagewire.shared.tool_calls.schema_constants import SchemaConstants
from pagewire.tests.support.costly_schemas import SCHEMAS
from pagewire.tests.support.growth import grows_in_proportion
from pagewire.tests.support.tool_answers import calls_of, parsed, parser
from pagewire.tests.unit.tool_calls.test_tool_grammar import Allowed

FORMATS = ("olmo3", "pythonic")  # with JSON's constants, and with Python's
NULL = {"type": "null"}
FLAGS = {"type": "array", "items": {"type": "boolean"}}
PLACE = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "at": {"type": ["integer", "null"]}},
    "required": ["on"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#/$defs/t"}, NULL]}, "ok": {"type": "boolean"}},
    "required": ["left"],
    "additionalProperties": False,
}
# Schema of an argument, values as Python writes them that follow it, and others.
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "text or null": (
        {"anyOf": [{"type": "string"}, NULL], "default": None, "title": "A"},
        ["None", '"a"'],
        ["True", "1", "Non"],
    ),
    "list of types": ({"type": ["string", "null"]}, ["None", '"a"'], ["False", "[]"]),
    "nullable": ({"type": "string", "nullable": True}, ["None", '"a"'], ["True"]),
    "nullable of any type": (
        {"minimum": 3, "maximum": 9, "nullable": True},
        ["None", "5", "True", '"a"'],
        ["2"],
    ),
    "not nullable": ({"type": "string", "nullable": False}, ['"a"'], ["None"]),
    "flag or text": (
        {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
        ["True", '"a"'],
        ["None"],
    ),
    "flags": (
        FLAGS,
        ["[]", "[True]", "[False, True]", "[true]"],
        ["True", "[None]", '["a"]', "[1]"],
    ),
    "bounded list": (
        {**FLAGS, "minItems": 1, "maxItems": 2, "uniqueItems": False},
        ["[True]", "[True, False]"],
        ["[]", "[True, True, True]"],
    ),
    "at least two": ({**FLAGS, "minItems": 2}, ["[True, False]", "[True, True, True]"], ["[True]"]),
    "empty list": ({"type": "array", "items": False}, ["[]"], ["[None]"]),
    "anything": (
        {},
        ["None", "True", '{"a": [None, {"b": False}], "c": -1.5e3}', "[[]]", '"a"', "{}"],
        ["{a: 1}", "None None", "[1", "nONE"],
    ),
    "true": (True, ["None", "[False]"], ["x"]),
    "constant": ({"const": True}, ["True", "true"], ["False", "1", "None"]),
    "one of some": (
        {"enum": ["a", 1, None, False]},
        ["None", "False", '"a"', "1"],
        ["True", "0", '"b"'],
    ),
    "some of a type": (
        {"type": ["null", "integer"], "enum": ["a", 1, None, True]},
        ["None", "1"],
        ["True", '"a"'],
    ),
    "only null of some": ({"type": "null", "enum": ["a", None]}, ["None"], ['"a"', "True"]),
    "constant and some": ({"const": None, "enum": [None, 1]}, ["None"], ["1"]),
    "object": (
        PLACE,
        ['{"on": True, "at": None}', '{"on": false}'],
        ["{}", '{"at": None, "on": True}', '{"on": 1}', '{"on": True, "x": 1}'],
    ),
    "object or null": (
        {"anyOf": [PLACE, NULL]},
        ["None", '{"on": False}'],
        ["True", '{"on": None}'],
    ),
    "object of types": (
        {**PLACE, "type": ["object", "null"]},
        ["None", '{"on": False, "at": 3}'],
        ["[]"],
    ),
    "map of flags": (
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        ["{}", '{"a": True, "b \\" c": False}'],
        ['{"a": None}', "{True: True}"],
    ),
    "open object": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]},
        ['{"a": 1, "b": None}', '{"b": None, "c": [True]}'],
        ['{"a": None, "b": 1}', '{"a": 1}', '{"b": 1, "a": True}'],
    ),
    "names": (
        {"type": "object", "properties": {'"é/\\\n': {"type": "boolean"}}},
        [r'{"\"é/\\\n": True, "x": None}'],
        [r'{"\"é/\\\n": None}'],
    ),
    "reference": ({"$ref": "#/$defs/p"}, ['{"on": True}'], ["True"]),
    "reference and words": ({"$ref": "#/$defs/p", "description": "d"}, ['{"on": True}'], ["None"]),
    "all of one": ({"allOf": [{"$ref": "#/$defs/p"}], "default": None}, ['{"on": True}'], ["None"]),
    "tree": (
        {"$ref": "#/$defs/t"},
        ['{"left": None, "ok": True}', '{"left": {"left": {"left": None}, "ok": False}}'],
        ["None", '{"left": True}'],
    ),
    "loop": ({"$ref": "#/$defs/l"}, ["True", "None"], ["1", "[None]"]),
    "one of": (
        {"oneOf": [NULL, FLAGS], "discriminator": {"propertyName": "x"}},
        ["None", "[True]"],
        ["True", "[None]"],
    ),
    "all of two": (
        {"allOf": [{"type": ["boolean", "null"]}, {"type": ["null", "string"]}]},
        ["None"],
        ["True"],
    ),
    "choice and more": (
        {"type": ["integer", "null"], "anyOf": [NULL, {"minimum": 1, "maximum": 3}]},
        ["None", "2"],
        ["True", "4"],
    ),
    "tuple": (
        {
            "type": ["array", "null"],
            "prefixItems": [{"type": "boolean"}],
            "items": False,
            "minItems": 1,
        },
        ["None", "[true]"],
        ["[None]", "True"],
    ),
    "half of it": (
        {"anyOf": [NULL, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
        ["None", "[1, 2]", "[]"],
        ["[1, 2, 3]", "[None]"],
    ),
}
DEFINITIONS = {
    "p": PLACE,
    "t": TREE,
    "l": {"anyOf": [{"$ref": "#/$defs/l"}, {"$ref": "#/$defs/m"}]},
    "m": {"anyOf": [{"$ref": "#/$defs/l"}, {"type": ["boolean", "null"]}]},
}


def function(schema: Any, strict: bool | None = None) -> Function:
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": DEFINITIONS}
    return Function("f", parameters=parameters, strict=strict)


def call(form: str, value: str) -> str:
    fields = TOOL_FORMATS[form]
    return f"{fields.open}{fields.begin}f(a={value}){fields.end}{fields.close}"


def read(form: str, text: str) -> Any:
    ((_, arguments),) = calls_of(parsed(parser(form, ["f"]), [text]))
    return arguments["a"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lenient", [False, True])
def test_constants_are_pythons_wherever_they_are(case: str, form: str, lenient: bool) -> None:
    schema, right, wrong = CASES[case]
    allowed = Allowed(form, functions=(function(schema),), lenient=lenient)
    is_python = TOOL_FORMATS[form].python_constants
    for value in right:
        if not is_python:
            value = value.replace("None", "null").replace("True", "true").replace("False", "false")
        text = call(form, value)
        assert allowed.allows(text), value
        found = read(form, text)
        assert found == ast.literal_eval(
            value.replace("null", "None").replace("true", "True").replace("false", "False")
        )
    for value in wrong:
        assert not allowed.allows(call(form, value)), value


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({}, {True, False, None}),
        ({"not": {"const": True}}, {False, None}),
        ({"if": {"type": "null"}, "else": {"const": True}}, {True, None}),
        ({"if": {"type": "null"}, "then": False}, {True, False}),
        ({"oneOf": [{"type": "boolean"}, {"enum": [True, None]}]}, {False, None}),
        ({"allOf": [{"$ref": "#/$defs/b"}, {"enum": [False, None]}]}, {False}),
        ({"anyOf": [{"const": 1}, {"const": 0}, {"const": "null"}]}, set()),
        ({"enum": [0, 1, "None"]}, set()),
        ({"minimum": 3, "type": ["number", "boolean"]}, {True, False}),
        ({"$ref": "#/$defs/nowhere"}, set()),
        ({"$ref": "#/$defs/itself"}, set()),
        ({"type": "string", "nullable": True}, {None}),
        ({"type": "flag"}, set()),
        ({"anyOf": [False, True]}, {True, False, None}),
    ],
)
def test_which_constants_follow_a_schema(schema: Any, right: set[bool | None]) -> None:
    root = {"$defs": {"b": {"type": "boolean"}, "itself": {"anyOf": [{"$ref": "#/$defs/itself"}]}}}
    constants = SchemaConstants(References(root))
    assert {each for each in (True, False, None) if constants.allows(schema, each)} == right


def test_where_a_value_may_have_constants() -> None:
    root: dict[str, Any] = {
        "$defs": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
            "b": {**PLACE, "properties": {"a": {"$ref": "#/$defs/a"}, "x": {"type": "boolean"}}},
            "c": {"type": "array", "items": {"$ref": "#/$defs/c"}},
        }
    }
    constants = SchemaConstants(References(root))
    for name, found in (("a", True), ("c", False), ("b", True)):
        assert constants.anywhere({"$ref": f"#/$defs/{name}"}) is found, name
    for schema, found in (
        ({"type": "object", "additionalProperties": False}, False),
        ({"type": "object"}, True),
        ({"type": "array"}, True),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, True),
        ({"type": "array", "items": {"enum": [1, "a"]}}, False),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, False),
        (False, False),
    ):
        assert constants.anywhere(schema) is found, schema


@pytest.mark.parametrize("form", FORMATS)
def test_strict_arguments_follow_their_schema_as_they_are_read(form: str) -> None:
    written = 0
    for case, (schema, _, _) in CASES.items():
        if "null" in case.split()[0] or case == "loop":  # jsonschema takes these in another way
            continue
        given = function(schema, strict=True)
        allowed = Allowed(form, functions=(given,), only_one=True)
        check_grammar(allowed.text, allowed.tokenizer)
        for seed in range(3):
            if (text := allowed.walk(seed, 120)) is not None:
                assert given.parameters is not None
                jsonschema.validate({"a": read(form, text)}, given.parameters)
                written += 1
    assert written > len(CASES)


@pytest.mark.parametrize("kind", ["nullable_references", "fans", "web_of_definitions", "deep"])
def test_rules_are_made_in_proportion(kind: str) -> None:
    def make(size: int) -> None:
        with contextlib.suppress(InvalidRequestError):  # too large, or too deep
            Allowed("pythonic", functions=(Function("f", parameters=SCHEMAS[kind](size)),))

    assert grows_in_proportion(make, 1 << 18)
