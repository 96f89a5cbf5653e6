"""What `strict` promises, in each format of calls: arguments follow the schema, or a refusal."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import jsonschema
import pytest

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.compiler import check_grammar
from pagewire.shared.tool_calls.definitions import Function, Tool, check_tools
from pagewire.shared.tool_calls.written_values import parameter_forms
from pagewire.tests.support.json_schemas import SchemaMaker
from pagewire.tests.support.tool_answers import calls_of, content_of, parsed, parser
from pagewire.tests.unit.tool_calls.test_tool_grammar import FORMATS, Allowed, calls_in

ONE_BY_ONE = ("pythonic", "olmo3", "qwen3_coder")
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 10, "maximum": 99}
SHORT: dict[str, Any] = {"type": "string", "maxLength": 6}
NULL = {"type": "null"}
ONE = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"b": NUMBER}, "required": ["b"]}


def value(schema: Any, **others: Any) -> dict[str, Any]:
    """The schema of a function with one argument."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **others}


# Schemas, arguments that follow them, and others.
ROOTS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "reference": ({"$ref": "#/$defs/r", "$defs": {"r": ONE}}, [{"a": 10}], [{}, {"a": 1}]),
    "older reference": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/r",
         "definitions": {"r": ONE}},
        [{"a": 10}],
        [{"a": "x"}, {"a": 10, "b": 10}],
    ),
    "reference to a reference": (
        {"$ref": "#/$defs/s", "$defs": {"r": ONE, "s": {"$ref": "#/$defs/r"}}},
        [{"a": 10}],
        [{}],
    ),
    "reference and more": (
        {"$ref": "#/$defs/r", "$defs": {"r": ONE}, **OTHER},
        [{"a": 10, "b": 10}, {"b": 10, "a": 10}],
        [{"a": 10}, {"b": 10}],
    ),
    "all of one": ({"allOf": [{"$ref": "#/$defs/r"}], "$defs": {"r": ONE}}, [{"a": 10}], [{}]),
    "all of two": ({"allOf": [ONE, OTHER]}, [{"a": 10, "b": 10}], [{"a": 10}, {"a": 1, "b": 10}]),
    "all of, closed": (
        {**OTHER, "properties": {"a": True, "b": True}, "additionalProperties": False,
         "allOf": [value({"minimum": 50}), value(NUMBER)]},
        [{"a": 60, "b": 1}],
        [{"a": 40, "b": 1}, {"a": 60, "b": 1, "c": 1}],
    ),
    "open": ({**ONE, "additionalProperties": True}, [{"a": 10}, {"a": 10, "x": 1}], [{}, {"x": 1}]),
    "open, and a listed one": (
        {"properties": {"k": {"enum": ["x", "y"]}}, "additionalProperties": True},
        [{}, {"k": "x"}, {"k": "x", "z": "k"}],
        [{"k": "z"}, {"z": "k", "k": "z"}],
    ),
    "open to numbers": (
        {**ONE, "additionalProperties": NUMBER},
        [{"a": 10, "x": 10, "y": 11}],
        [{"a": 10, "x": "t"}, {"a": 10, "x": 1}],
    ),
    "open, and none of one name": (
        {"properties": {"a": False, "b": NUMBER}, "additionalProperties": True},
        [{}, {"b": 10, "c": "x"}],
        [{"a": 10}, {"b": 10, "a": "x"}],
    ),
    "only others": ({"additionalProperties": NUMBER}, [{}, {"x": 10}], [{"x": 1}]),
    "required and not declared": (
        {**ONE, "required": ["a", "b"]},
        [{"a": 10, "b": "x"}],
        [{"a": 10}, {"a": 10, "b": "x", "c": 1}],
    ),
    "required of others": (
        {**ONE, "required": ["a", "b"], "additionalProperties": NUMBER},
        [{"a": 10, "b": 10}, {"a": 10, "b": 10, "c": 10}],
        [{"a": 10}, {"a": 10, "c": 10}, {"a": 10, "b": 1}],
    ),
    "null keywords": (
        {**ONE, "required": None, "additionalProperties": None, "anyOf": None, "$ref": None},
        [{}, {"a": 10}],
        [{"a": 1}, {"b": 1}],
    ),
    "another property": (
        {**ONE, "properties": {"a": NUMBER, "b": {"$ref": "#/properties/a"}}},
        [{"a": 10, "b": 10}],
        [{"a": 10, "b": 1}],
    ),
    "itself": (
        {**ONE, "properties": {"a": NUMBER, "b": {"$ref": "#"}}},
        [{"a": 10}, {"a": 10, "b": {"a": 10, "b": {"a": 10}}}],
        [{"a": 10, "b": {}}],
    ),
}  # fmt: skip
ARGUMENTS: dict[str, dict[str, Any]] = {
    "part of a definition": value(
        {"$ref": "#/$defs/x/properties/y"}, **{"$defs": {"x": {"properties": {"y": NUMBER}}}}
    ),
    "escaped": value({"$ref": "#/$defs/a~1b~0c%25"}, **{"$defs": {"a/b~c%": NUMBER}}),
    "anchor": value({"$ref": "#n"}, **{"$defs": {"x": {**NUMBER, "$anchor": "n"}}}),
    "words or null": value({"anyOf": [{"type": "string", "enum": ["red", "green"]}, NULL]}),
    "mixed enumeration": value({"enum": ["red", "1", 1, None, True, [1], {"b": 1}]}),
    "constant or number": value({"anyOf": [{"const": "all"}, NUMBER]}),
    "text or number": value({"anyOf": [SHORT, NUMBER]}),
    "text or flag": value({"type": ["string", "boolean"], "maxLength": 5}),
    "text or null": value({"type": ["string", "null"], "maxLength": 5, "minLength": 2}),
    "text or list": value(
        {"anyOf": [SHORT, {"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 1}]}
    ),
    "pattern or null": value({"oneOf": [{"type": "string", "pattern": "^[a-z]{2}$"}, NULL]}),
    "referred text or null": value(
        {"anyOf": [{"$ref": "#/$defs/t"}, NULL]}, **{"$defs": {"t": {"enum": ["x", "y"]}}}
    ),
    "all of": value({"allOf": [{"type": "string"}, {"maxLength": 3}, {"pattern": "^a"}]}),
    "date": value({"type": "string", "format": "date"}),
    "time or null": value({"anyOf": [{"type": "string", "format": "date-time"}, NULL]}),
    "identifier": value({"type": "string", "format": "uuid"}),
    "enumeration of a pattern": value({"enum": ["aa", "ba"], "pattern": "^a"}),
    "enumeration of a length": value(
        {"enum": ["[1]", "aa", [1, 2]], "maxLength": 2, "anyOf": [{"maxItems": 3}]}
    ),
    "only null": value({"const": None}),
    "constant and some": value({"const": "a", "enum": ["a", "b"]}),
    "constant and some numbers": value({"const": 1, "enum": ["1", 1.0, True]}),
    "false": {"type": "object", "properties": {"a": False}},
}
# Schemas that formats with arguments one by one cannot express, and what the refusal names.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "any of": ({"anyOf": [ONE, OTHER]}, "anyOf"),
    "not": ({**ONE, "not": OTHER}, "not"),
    "patterns": ({**ONE, "patternProperties": {"^x": NUMBER}}, "patternProperties"),
    "count": ({**ONE, "maxProperties": 1}, "maxProperties"),
    "dependent": ({**ONE, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "in a part": ({"allOf": [ONE, {"minProperties": 1}]}, "minProperties"),
    "behind a reference": (
        {"$ref": "#/$defs/r", "$defs": {"r": {**ONE, "oneOf": [ONE]}}},
        "oneOf",
    ),
    "name": (value(NUMBER) | {"properties": {"a b": NUMBER}, "required": []}, "'a b'"),
    "closed": ({**ONE, "required": ["b"], "additionalProperties": False}, "'b'"),
    "never": (value({"enum": []}), "no value can be written|empty"),
    "other constant": (value({"const": "a", "enum": ["b"]}), "no value can be written|empty"),
    "another type": (value({"const": 1, "enum": [True, "1"]}), "no value|incompatible types"),
}
# Those of texts, in qwen3_coder.
REFUSED_TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"type": "string", "format": "uri"}, "format"),
    "not": ({"type": "string", "not": {"const": "a"}}, "not"),
    "one of": ({"oneOf": [SHORT, {"type": "string", "minLength": 2}]}, "oneOf"),
    "one null of two": ({"oneOf": [{"type": ["string", "null"]}, NULL]}, "oneOf"),
    "length": ({"type": "string", "maxLength": 100_000}, "maxLength"),
    "end tag": ({"const": "a</parameter>b"}, "no value can be written"),
    "or null": ({"anyOf": [{"type": "string", "format": "regex"}, NULL]}, "format"),
}


def strict(schema: dict[str, Any]) -> Function:
    function = Function("f", parameters=schema, strict=True)
    check_tools([Tool("function", function)], "auto")
    return function


def follow(schema: dict[str, Any], form: str, walks: int) -> int:
    """Write calls at random; check that each follows the schema as it is read."""
    function = strict(schema)
    allowed, forms = Allowed(form, functions=(function,), only_one=True), parameter_forms(function)
    schema = {key: each for key, each in schema.items() if each is not None}
    written = 0
    for seed in range(walks):
        text = allowed.walk(seed, 200)
        if text is not None:
            events = parsed(parser(form, ["f"], forms={"f": forms}), [text])
            ((_, arguments),) = calls_of(events)
            jsonschema.validate(arguments, schema)
            assert content_of(events) == ""
            written += 1
    return written


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", ROOTS)
def test_a_functions_schema_is_followed(case: str, form: str) -> None:
    schema, right, wrong = ROOTS[case]
    allowed = Allowed(form, functions=(strict(schema),))
    for arguments in right:
        # In the schema's order, what others there are last.
        first = [name for name in ("b", "a") if list(arguments) == ["b", "a"]]
        assert first or any(
            allowed.allows(calls_in(form, [("f", given)]))
            for given in (arguments, dict(reversed(arguments.items())))
        ), arguments
    for arguments in wrong:
        assert not allowed.allows(calls_in(form, [("f", arguments)])), arguments


@pytest.mark.parametrize("form", [*ONE_BY_ONE, "hermes"])
@pytest.mark.parametrize("case", ARGUMENTS)
def test_the_schema_of_an_argument_is_followed(case: str, form: str) -> None:
    assert follow(ARGUMENTS[case], form, 5) >= 3


@pytest.mark.parametrize("form", ONE_BY_ONE)
def test_schemas_at_random_are_followed(form: str) -> None:
    maker = SchemaMaker(seed=3)
    for _ in range(25):
        follow(maker.make(), form, 2)


@pytest.mark.parametrize("form", ONE_BY_ONE)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_with_its_name(case: str, form: str) -> None:
    if (case, form) == ("name", "qwen3_coder"):
        schema: dict[str, Any] = {"properties": {"a\nb": NUMBER}}
        named = r"'a\\nb'"
    else:
        schema, named = REFUSED[case]
    refuse(schema, form, named)


@pytest.mark.parametrize("case", REFUSED_TEXTS)
def test_texts_that_cannot_be_followed_are_refused(case: str) -> None:
    schema, named = REFUSED_TEXTS[case]
    refuse(value(schema), "qwen3_coder", named)
    lenient = Function("f", parameters=value(schema))
    if case != "end tag":
        kept = Allowed("qwen3_coder", functions=(lenient,), lenient=True)
        assert kept.allows(calls_in("qwen3_coder", [("f", {"a": "x:y"})])), json.dumps(schema)


def refuse(schema: dict[str, Any], form: str, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        allowed = Allowed(form, functions=(strict(schema),))
        check_grammar(allowed.text, allowed.tokenizer)


HOSTILE: dict[str, dict[str, Any]] = {
    "doubling": {
        "allOf": [{"$ref": "#/$defs/0"}] * 2,
        "$defs": {
            str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(60)
        } | {"60": ONE},
    },
    "alternatives that double": value(
        {"$ref": "#/$defs/0"},
        **{"$defs": {
            str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2, "description": "d"}
            for at in range(60)
        } | {"60": SHORT}},
    ),
    "many parts": {
        "allOf": [{"properties": {f"p{at}": SHORT}} for at in range(20_000)],
    },
    "wrong names": {"properties": {f"a\n{at}": SHORT for at in range(20_000)}},
    "definitions of their own": {
        "properties": {
            f"p{at}": {"$defs": {"x": SHORT}, "anyOf": [{"$ref": "#n"}, {"$ref": "#/$defs/x"}]}
            for at in range(1_000)
        },
        "$defs": {"n": {"$anchor": "n", "type": "string"}},
    },
    "products": value({"allOf": [{"anyOf": [SHORT, {"const": str(at)}, {"pattern": "a"}]}
                                 for at in range(2_000)]}),
    "deep": value(deep := SHORT | {"anyOf": [SHORT]}),
}  # fmt: skip
for _ in range(300):
    deep["anyOf"] = [SHORT | {"anyOf": deep["anyOf"]}]


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_meant_to_take_long_does_not(case: str) -> None:
    """It is followed or refused: with more work than for its size, none of these would end."""
    began_s = time.process_time()
    function = Function("f", parameters=HOSTILE[case])
    check_tools([Tool("function", function)], "auto")
    parameter_forms(function)
    for form in ("pythonic", "qwen3_coder"):
        for lenient in (False, True):
            with contextlib.suppress(InvalidRequestError):
                Allowed(form, functions=(function,), lenient=lenient)
    assert time.process_time() - began_s < 10
