"""Definitions of a schema's parts, which move to the whole schema."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from llguidance import LLMatcher

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.json_schemas import json_grammar
from pagewire.shared.grammar.own_definitions import with_definitions_moved
from pagewire.shared.grammar.references import References, check_references
from pagewire.shared.grammar.structures import grammar_text
from pagewire.shared.request.structured_outputs import StructuredOutputs
from pagewire.tests.support.costly_schemas import Schema
from pagewire.tests.support.grammars import EOS, demo_vocabulary
from pagewire.tests.support.growth import grows_in_proportion

NUMBER, TEXT, FLAG = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


def ref(path: str) -> Schema:
    return {"$ref": f"#/{path}"}


def own(definitions: Schema, key: str = "$defs", **others: Any) -> Schema:
    return {**others, key: definitions}


# A schema, and what its property `a` is once no part but the whole has definitions.
CASES: dict[str, tuple[Schema, Any]] = {
    "of a property": ({"properties": {"a": own({"x": NUMBER}, **ref("$defs/x"))}}, NUMBER),
    "older": (
        {"properties": {"a": own({"x": NUMBER}, "definitions", **ref("definitions/x"))}},
        NUMBER,
    ),
    "the whole's first": (
        {"properties": {"a": own({"x": NUMBER}, **ref("$defs/x"))}, "$defs": {"x": TEXT}},
        TEXT,
    ),
    "the nearest": (
        {
            "properties": {
                "a": own({"x": TEXT}, anyOf=[own({"x": NUMBER}, items=[ref("$defs/x")])]),
            }
        },
        {"anyOf": [{"items": [NUMBER]}]},
    ),
    "one further out": (
        {"properties": {"a": own({"x": NUMBER}, anyOf=[own({"y": TEXT}, **ref("$defs/x"))])}},
        {"anyOf": [NUMBER]},
    ),
    "one another": (
        {"properties": {"a": own({"x": ref("$defs/y"), "y": NUMBER}, **ref("$defs/x"))}},
        NUMBER,
    ),
    "within a definition": (
        {"properties": {"a": ref("$defs/x")}, "$defs": {"x": own({"y": FLAG}, **ref("$defs/y"))}},
        FLAG,
    ),
    "with equal names": (
        {
            "properties": {
                "a": {"properties": {
                    "b": own({"x": NUMBER}, **ref("$defs/x")),
                    "c": own({"x": TEXT}, **ref("$defs/x")),
                    "d": ref("$defs/z"),
                }},
            },
            "$defs": {"z": FLAG},
        },
        {"properties": {"b": NUMBER, "c": TEXT, "d": FLAG}},
    ),
    "a part of one": (
        {"properties": {"a": own({"x": {"items": NUMBER}}, **ref("$defs/x/items"))}},
        NUMBER,
    ),
    "through a path": (
        {"properties": {"a": ref("properties/b/$defs/x/items"),
                        "b": own({"x": {"items": NUMBER}})}},
        NUMBER,
    ),
    "odd names": (
        {"properties": {"a": own({"a/b ~%": NUMBER}, **ref("$defs/a~1b%20~0%25"))}},
        NUMBER,
    ),
    "a property of that name": (
        {"properties": {"a": {"properties": {"$defs": NUMBER, "definitions": TEXT}}}},
        {"properties": {"$defs": NUMBER, "definitions": TEXT}},
    ),
    "values of that name": (
        {"properties": {"a": {"const": {"$defs": {"x": {}}, "$ref": "#/$defs/x"}}}},
        {"const": {"$defs": {"x": {}}, "$ref": "#/$defs/x"}},
    ),
}  # fmt: skip


def resolved(schema: Any, root: Schema) -> Any:
    """Replace references by what they lead to."""
    if isinstance(schema, list):
        return [resolved(each, root) for each in schema]
    if not isinstance(schema, dict) or "const" in schema:
        return schema
    if isinstance(schema.get("$ref"), str):
        return resolved(References(root).find(schema["$ref"]), root)
    return {key: resolved(each, root) for key, each in schema.items()}


@pytest.mark.parametrize("case", CASES)
def test_definitions_move_to_the_whole(case: str) -> None:
    schema, found = CASES[case]
    moved = with_definitions_moved(schema)
    check_references(moved)
    assert resolved(moved["properties"]["a"], moved) == found
    assert with_definitions_moved(moved) is moved


@pytest.mark.parametrize("case", ["of a property", "with equal names", "within a definition"])
def test_forms_follow_them(case: str) -> None:
    schema, _ = CASES[case]
    text = json_grammar({**schema, "required": ["a"], "additionalProperties": False})
    right = {"of a property": "1", "within a definition": "true"}.get(case, '{"b": 1, "c": "x"}')
    for value, is_right in ((right, True), ('{"b":"x"}', False)):
        matcher = LLMatcher(demo_vocabulary(), text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = demo_vocabulary().tokenize_str(f'{{"a":{value}}}')
        assert matcher.consume_tokens([*tokens, EOS[0]]) is is_right, value


def test_what_leads_nowhere_is_refused_as_ever() -> None:
    schema = {"properties": {"a": own({"x": NUMBER}, **ref("$defs/y")), "b": ref("$defs/x")}}
    with pytest.raises(InvalidRequestError, match="'#/\\$defs/y' leads nowhere"):
        grammar_text(StructuredOutputs(json=schema), "response_format")


def test_a_schema_without_such_definitions_stays_the_same_object() -> None:
    schema = {"properties": {"a": ref("$defs/x")}, "$defs": {"x": NUMBER}}
    assert with_definitions_moved(schema) is schema


def test_parts_that_are_nested_too_deeply_are_refused() -> None:
    schema: Schema = own({"x": NUMBER}, **ref("$defs/x"))
    for _ in range(200):
        schema = {"anyOf": [schema]}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        grammar_text(StructuredOutputs(json=schema), "response_format")


@pytest.mark.parametrize("how", ["side by side", "in one another", "of one name"])
def test_they_move_in_proportion(how: str) -> None:
    def make(size: int) -> Schema:
        count = size // 64
        if how == "in one another":
            inner: Any = {"enum": [1] * size}
            for number in range(30):
                inner = own({f"x{number}": inner}, **ref(f"$defs/x{number}"))
            return {"items": inner}
        names = ["x"] * count if how == "of one name" else [f"x{at}" for at in range(count)]
        parts = {f"p{at}": own({name: NUMBER}, **ref(f"$defs/{name}"))
                 for at, name in enumerate(names)}  # fmt: skip
        return {"properties": parts}

    schemas = {size: make(size) for size in itertools.chain([1 << 18, (1 << 18) // 16])}
    assert grows_in_proportion(lambda size: with_definitions_moved(schemas[size]), 1 << 18)
