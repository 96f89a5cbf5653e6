"""The forms that a request may ask for, and the grammar text of each.

The fields are those of vLLM's `structured_outputs`. A grammar text is what llguidance's
`grammar_from_...` make: a Lark grammar, or JSON with a list of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import msgspec
from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.structured_outputs import (
    MAX_GRAMMAR_CHARS,
    JsonText,
    StructuralTag,
    StructuredOutputs,
)

# Between the parts of JSON: a space or a new line, or nothing. Where more is allowed, a model that
# likes spaces, or once has begun to indent, may never come to the next part.
JSON_WHITE_SPACE = r"[ \n]?"
_NO_WHITE_SPACE = {"whitespace_flexible": False}

MAX_EXACT = 2**53  # float64 has all integers up to this

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def grammar_text(asked: StructuredOutputs, field: str = "structured_outputs") -> str | None:
    """Return the grammar text of what is asked for; None if nothing is.

    It is not checked whether it compiles; see `compiler.check_grammar`.

    Args:
        asked: the form.
        field: the request's field, for errors.

    Raises:
        InvalidRequestError: more than one form is asked for, or it cannot be read; names the field.
    """
    kinds = [kind for kind in _KINDS if getattr(asked, kind) not in (None, False)]
    if asked.json is False:
        raise InvalidRequestError(f"{field}: the schema false allows nothing", field)
    if not kinds:
        return None
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"{field}: only one of {', '.join(_KINDS)} is possible, not {' and '.join(kinds)}",
            field,
        )
    try:
        text = _MAKERS[kinds[0]](asked)
    except (ValueError, msgspec.DecodeError, RecursionError) as exc:
        raise InvalidRequestError(f"{field}: {kinds[0]} cannot be read: {exc}", field) from exc
    return checked_size(text, field)


def read_structured_outputs(asked: object, field: str) -> StructuredOutputs:
    """Return what was made in Python, a struct or its fields in a dictionary, with all checked.

    Raises:
        InvalidRequestError: a field is unknown or has a wrong type or value; names the field.
    """
    fields = msgspec.structs.asdict(asked) if isinstance(asked, StructuredOutputs) else asked
    try:
        return msgspec.convert(fields, StructuredOutputs)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"{field}: {exc}", field) from exc


def checked_size(text: str, field: str) -> str:
    """Return a grammar text that is not too long.

    Raises:
        InvalidRequestError: it is; names the field.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{field}: a grammar of {len(text)} characters is too large: at most "
            f"{MAX_GRAMMAR_CHARS} are possible",
            field,
        )
    return text


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
    _check_numbers(msgspec.json.decode(text))
    return LLMatcher.grammar_from_json_schema(
        text, overrides=cast(Any, options or {"whitespace_pattern": JSON_WHITE_SPACE})
    )


def _check_numbers(schema: Any) -> None:
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
                _check_numbers(value)
        case list():
            for value in schema:
                _check_numbers(value)


def _has_large_number(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_has_large_number, value.values()))
        case list():
            return any(map(_has_large_number, value))
        case int() | float():
            return abs(value) > MAX_EXACT
    return False


def regex_grammar(regex: str) -> str:
    """Return the grammar text of a regular expression."""
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: list[str]) -> str:
    """Return the grammar text of an answer that is one of these."""
    # A terminal: a rule's alternatives are items of the parser's, of which it takes few.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


def lark_grammar(grammar: str) -> str:
    """Return the grammar text of a grammar in Lark's or GBNF's syntax.

    Raises:
        ValueError: it is in neither.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return grammar  # is refused for that
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(grammar))
    except RecursionError:
        raise
    except Exception as exc:  # its reader of GBNF has errors of several types
        raise ValueError(str(exc)) from exc


def tag_grammar(tag: StructuralTag) -> str:
    """Return the grammar text of text in which structures begin at triggers.

    Raises:
        ValueError: a structure begins with none of the triggers, or has a number too large.
    """
    tags = []
    for structure in tag.structures:
        _check_numbers(structure.schema)
        trigger = next((t for t in tag.triggers if structure.begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"{structure.begin!r} begins with none of the triggers")
        schema = structure.schema | {"x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
        tags.append(
            StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end)
        )
    return StructTag.to_grammar(tags, assume_special=False)


def _json_options(asked: StructuredOutputs) -> dict[str, Any] | None:
    if asked.whitespace_pattern is not None:
        return {"whitespace_pattern": asked.whitespace_pattern}
    return _NO_WHITE_SPACE if asked.disable_any_whitespace else None


def _of_tag(asked: StructuredOutputs) -> str:
    given = asked.structural_tag
    if isinstance(given, str):
        return tag_grammar(msgspec.json.decode(given, type=StructuralTag))
    return tag_grammar(msgspec.convert(given, StructuralTag))


_MAKERS: dict[str, Callable[[StructuredOutputs], str]] = {
    "json": lambda asked: json_grammar(cast(JsonText, asked.json), _json_options(asked)),
    "regex": lambda asked: regex_grammar(cast(str, asked.regex)),
    "choice": lambda asked: choice_grammar(cast(list[str], asked.choice)),
    "grammar": lambda asked: lark_grammar(cast(str, asked.grammar)),
    "json_object": lambda asked: json_grammar({"type": "object"}, _json_options(asked)),
    "structural_tag": _of_tag,
}
