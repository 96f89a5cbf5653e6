"""Grammar texts of JSON schemas."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from llguidance import LLMatcher

from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS, JsonText

# Between the parts of JSON: a space or a new line, or nothing. Where more is allowed, a model that
# likes spaces, or once has begun to indent, may never come to the next part.
JSON_WHITE_SPACE = r"[ \n]?"

MAX_EXACT = 2**53  # float64 has all integers up to this


def json_grammar(schema: JsonText, options: dict[str, Any] | None = None) -> str:
    """Return the grammar text of a JSON schema.

    Args:
        schema: as an object or as text.
        options: of llguidance's JSON compiler; by default white space is free within a bound.

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
    check_numbers(msgspec.json.decode(text))
    return LLMatcher.grammar_from_json_schema(
        text, overrides=cast(Any, options or {"whitespace_pattern": JSON_WHITE_SPACE})
    )


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
    return f"%json {msgspec.json.encode(schema | options).decode()}"
