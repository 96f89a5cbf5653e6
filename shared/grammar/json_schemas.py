"""Grammar texts of JSON schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
from llguidance import LLMatcher

from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS, JsonText

# Between the parts of JSON: a space or a new line, or nothing. Where more is allowed, a model that
# likes spaces, or once has begun to indent, may never come to the next part.
JSON_WHITE_SPACE = r"[ \n]?"

MAX_EXACT = 2**53  # float64 has all integers up to this

_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}  # objects, by any names
_OF_VALUES = {"const", "enum", "default", "examples"}


def json_grammar(
    schema: JsonText, options: dict[str, Any] | None = None, closed: bool = False
) -> str:
    """Return the grammar text of a JSON schema.

    Args:
        schema: as an object or as text.
        options: of llguidance's JSON compiler; by default white space is free within a bound.
        closed: objects have no properties that are not declared, unless their schema says more.

    Raises:
        ValueError: the text is not JSON, not of a schema, or has a number that is too large.
    """
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    if len(text) > MAX_GRAMMAR_CHARS:
        return text  # is refused for that
    if text.strip() == "true":
        text = "{}"
    if not text.lstrip().startswith("{"):
        msgspec.json.decode(text)
        raise ValueError("a schema must be an object or true")
    decoded = msgspec.json.decode(text)
    check_numbers(decoded)
    kept = _changed(decoded, _without_idle_keywords)
    kept = _changed(kept, _closed) if closed else kept
    if kept != decoded:
        text = msgspec.json.encode(kept).decode()
    return LLMatcher.grammar_from_json_schema(
        text, overrides=cast(Any, options or {"whitespace_pattern": JSON_WHITE_SPACE})
    )


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema in which each one, that in it first, has been changed."""
    match schema:
        case dict():
            return change({key: _changed_in(key, each, change) for key, each in schema.items()})
        case list():
            return [_changed(each, change) for each in schema]
    return schema


def _changed_in(key: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if key in _OF_SCHEMAS and isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    return value if key in _OF_VALUES else _changed(value, change)


def _without_idle_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without keywords that say nothing, which llguidance refuses all the same.

    Libraries write `"uniqueItems": false` and, of records, `"propertyNames": {"type": "string"}`.
    """
    return {key: value for key, value in schema.items() if not _is_idle(key, value)}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    is_listed = "properties" in schema or "patternProperties" in schema
    return {"additionalProperties": False, **schema} if is_listed else schema


def _is_idle(key: str, value: Any) -> bool:
    if key == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    return key == "uniqueItems" and value is False


def check_numbers(schema: Any) -> None:
    """Check that llguidance, which has them as float64, makes no other numbers of those to write.

    Raises:
        ValueError: it does.
    """
    match schema:
        case dict():
            written = (schema.get("const"), schema.get("enum"))
            if any(map(_has_large_number, written)):
                raise ValueError("numbers in const and enum must be between -2**53 and 2**53")
            for value in schema.values():
                check_numbers(value)
        case list():
            for value in schema:
                check_numbers(value)


def _has_large_number(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_has_large_number, value.values()))
        case list():
            return any(map(_has_large_number, value))
        case int() | float():
            return abs(value) > MAX_EXACT
    return False


def schema_rule(schema: dict[str, Any]) -> str:
    """Return a JSON schema as a rule in llguidance's syntax of Lark.

    Raises:
        ValueError: it has a number that is too large.
    """
    check_numbers(schema)
    options = {"x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
    return (
        f"%json {msgspec.json.encode(_changed(schema, _without_idle_keywords) | options).decode()}"
    )
