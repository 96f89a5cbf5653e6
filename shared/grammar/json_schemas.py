"""Grammar texts of JSON schemas."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from llguidance import LLMatcher

from pagewire.shared.schema_fit import changed, fitted
from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS, JsonText

# Between the parts of JSON: a space or a new line, or nothing. Where more is allowed, a model that
# likes spaces, or once has begun to indent, may never come to the next part.
JSON_WHITE_SPACE = r"[ \n]?"


def json_grammar(
    schema: JsonText, options: dict[str, Any] | None = None, closed: bool = False
) -> str:
    """Return the grammar text of a JSON schema.

    Args:
        schema: as an object or as text.
        options: of llguidance's JSON compiler; by default white space is free within a bound.
        closed: objects have no properties that are not declared, unless their schema says more.

    Raises:
        ValueError: the text is not JSON, not of a schema, has numbers that are too large, or is
            nested too deeply.
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
    kept = fitted(decoded)
    kept = changed(kept, _closed) if closed else kept
    if kept != decoded:
        text = msgspec.json.encode(kept).decode()
    return LLMatcher.grammar_from_json_schema(
        text, overrides=cast(Any, options or {"whitespace_pattern": JSON_WHITE_SPACE})
    )


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    is_listed = "properties" in schema or "patternProperties" in schema
    return {"additionalProperties": False, **schema} if is_listed else schema


def schema_rule(schema: dict[str, Any]) -> str:
    """Return a JSON schema as a rule in llguidance's syntax of Lark.

    Raises:
        ValueError: it has numbers that are too large, or is nested too deeply.
    """
    options = {"x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
    return f"%json {msgspec.json.encode(fitted(schema) | options).decode()}"
