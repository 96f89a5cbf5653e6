"""Turns a JSON schema into the text of a grammar for llguidance."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from llguidance import LLMatcher

from pagewire.shared.grammar.own_definitions import with_definitions_moved
from pagewire.shared.grammar.references import check_references
from pagewire.shared.grammar.schema_fit import changed, fitted
from pagewire.shared.request.structured_outputs import MAX_GRAMMAR_CHARS, JsonText

# White space between the parts of JSON: one space, one new line, or nothing. If more is allowed, a
# model may write white space without end.
JSON_WHITE_SPACE = r"[ \n]?"


def json_grammar(
    schema: JsonText, options: dict[str, Any] | None = None, closed: bool = False
) -> str:
    """Return the grammar text of a JSON schema.

    Args:
        schema: the schema as an object or as text.
        options: options of llguidance's JSON compiler; by default, `JSON_WHITE_SPACE` may be
            anywhere between the parts.
        closed: objects that list properties have only these, unless their schema has
            `additionalProperties`.

    Raises:
        ValueError: the text is not JSON or not a schema, has numbers that are too large or a
            reference that leads nowhere, or is nested too deeply.
    """
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    if text.strip() == "true":
        text = "{}"
    if not text.lstrip().startswith("{"):
        msgspec.json.decode(text)
        raise ValueError("a schema must be an object or true")
    decoded = msgspec.json.decode(text)
    moved = with_definitions_moved(decoded)
    check_references(moved)
    schema = fitted(moved)
    schema = changed(schema, _closed) if closed else schema
    if schema != decoded:
        text = msgspec.json.encode(schema).decode()
    if len(text) > MAX_GRAMMAR_CHARS:
        return text  # `checked_size` refuses it
    return LLMatcher.grammar_from_json_schema(
        text, overrides=cast(Any, options or {"whitespace_pattern": JSON_WHITE_SPACE})
    )


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    is_listed = "properties" in schema or "patternProperties" in schema
    return {"additionalProperties": False, **schema} if is_listed else schema


def schema_rule(schema: dict[str, Any]) -> str:
    """Return a JSON schema as the body of a rule in llguidance's dialect of Lark.

    Raises:
        ValueError: the schema has numbers that are too large, or is nested too deeply.
    """
    schema = with_definitions_moved(schema)
    check_references(schema)
    options = {"x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
    return f"%json {msgspec.json.encode(fitted(schema) | options).decode()}"
