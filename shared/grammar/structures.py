"""Makes the grammar text of each form that a request may ask its answer to have.

The fields are those of vLLM's `structured_outputs`. A grammar text is a Lark grammar, or JSON with
a list of grammars, as llguidance's functions `grammar_from_...` return it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import msgspec
from llguidance import LLMatcher

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.base.surrogates import lone_surrogate
from pagewire.shared.grammar.json_schemas import json_grammar
from pagewire.shared.grammar.lark_texts import lark_text
from pagewire.shared.grammar.reasons import plain_reason
from pagewire.shared.grammar.regex_texts import in_ascii
from pagewire.shared.grammar.tag_grammar import tag_grammar
from pagewire.shared.request.structured_outputs import (
    MAX_GRAMMAR_CHARS,
    JsonText,
    StructuralTag,
    StructuredOutputs,
)
from pagewire.shared.text.markers import NO_MARKERS, Markers

_NO_WHITE_SPACE = {"whitespace_flexible": False}


def grammar_text(
    outputs: StructuredOutputs, field: str = "structured_outputs", markers: Markers = NO_MARKERS
) -> str | None:
    """Return the grammar text of the form that a request asks for; None if it asks for none.

    The text may still fail to compile; see `compiler.check_grammar`.

    Args:
        outputs: the request's structured output fields.
        field: name of the request's field, for errors.
        markers: the model's special tokens, which structural tags may contain.

    Raises:
        InvalidRequestError: more than one form is given, or the form cannot be read; the error
            names the field.
    """
    kinds = [kind for kind in _MAKERS if getattr(outputs, kind) not in (None, False)]
    if outputs.json is False:
        raise InvalidRequestError(f"{field}: the schema false allows nothing", field)
    if not kinds:
        return None
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"{field}: only one of {', '.join(_MAKERS)} is possible, not {' and '.join(kinds)}",
            field,
        )
    try:
        text = _MAKERS[kinds[0]](outputs, markers)
    except (ValueError, msgspec.DecodeError, RecursionError) as exc:
        given = getattr(outputs, kinds[0])
        half = lone_surrogate(given) if isinstance(given, str) else None
        reason = plain_reason(str(exc)) if half is None else half[1]
        raise InvalidRequestError(f"{field}: {kinds[0]} cannot be read: {reason}", field) from exc
    return checked_size(text, field)


def read_structured_outputs(outputs: object, field: str) -> StructuredOutputs:
    """Return structured output fields that were given in Python, as a struct or a dictionary.

    Raises:
        InvalidRequestError: a field is unknown or has a wrong type or value; the error names
            the field.
    """
    fields = msgspec.structs.asdict(outputs) if isinstance(outputs, StructuredOutputs) else outputs
    try:
        return msgspec.convert(fields, StructuredOutputs)
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(f"{field}: {exc}", field) from exc


def checked_size(text: str, field: str) -> str:
    """Return the grammar text unchanged.

    Raises:
        InvalidRequestError: the text is too long; the error names the field.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{field}: a grammar of {len(text)} characters is too large: at most "
            f"{MAX_GRAMMAR_CHARS} are possible",
            field,
        )
    return text


def regex_grammar(regex: str) -> str:
    """Return the grammar text of a regular expression."""
    return LLMatcher.grammar_from_regex(in_ascii(regex))


def choice_grammar(choices: list[str]) -> str:
    """Return the grammar text of an answer that is one of these texts."""
    # A terminal: each alternative of a rule would count as an item of the parser (limits.py).
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


def _json_options(outputs: StructuredOutputs) -> dict[str, Any] | None:
    if outputs.whitespace_pattern is not None:
        return {"whitespace_pattern": in_ascii(outputs.whitespace_pattern)}
    return _NO_WHITE_SPACE if outputs.disable_any_whitespace else None


def _of_tag(outputs: StructuredOutputs, markers: Markers) -> str:
    given = outputs.structural_tag
    if isinstance(given, str):
        return tag_grammar(msgspec.json.decode(given, type=StructuralTag), markers)
    return tag_grammar(msgspec.convert(given, StructuralTag), markers)


_MAKERS: dict[str, Callable[[StructuredOutputs, Markers], str]] = {
    "json": lambda outputs, _: json_grammar(
        cast(JsonText, outputs.json), _json_options(outputs), outputs.disable_additional_properties
    ),
    "regex": lambda outputs, _: regex_grammar(cast(str, outputs.regex)),
    "choice": lambda outputs, _: choice_grammar(cast(list[str], outputs.choice)),
    "grammar": lambda outputs, _: lark_text(cast(str, outputs.grammar)),
    "json_object": lambda outputs, _: json_grammar({"type": "object"}, _json_options(outputs)),
    "structural_tag": _of_tag,
}
