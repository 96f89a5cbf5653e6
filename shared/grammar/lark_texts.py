"""Checks and translates grammars that clients write, in the syntax of Lark or GBNF."""

from __future__ import annotations

import json
import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from pagewire.shared.grammar.own_definitions import with_definitions_moved
from pagewire.shared.grammar.schema_fit import fitted
from pagewire.shared.request.structured_outputs import MAX_GRAMMAR_CHARS

# A Lark grammar has a rule `start` or `?start`; GBNF's rules have `::=`. Each line is read once.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|[?!]*start[^\s:]*[^\S\n]*:(?!:=))", re.MULTILINE)
# Parts of GBNF: a string, a character class, or spaces and comments with perhaps a `|` after them.
# llguidance mistakes a `|` at the beginning of a line for a rule without a name.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|\[(?:\\.|[^\]\\\n])*\]?|(?P<spaces>(?:\s|#[^\n]*)+)(?P<more>\|?)'
)
# Parts of Lark in which a `%json` is text (strings, regular expressions, comments, special tokens),
# and the `%json` before a schema.
_LARK_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|(?:#|//)[^\n]*|<[^<>\s]+>|(?P<json>%json)\s*'
)
_decoder = json.JSONDecoder()


def lark_text(grammar: str) -> str:
    """Return a grammar in the syntax of Lark.

    Args:
        grammar: a grammar in the syntax of Lark or GBNF.

    Raises:
        ValueError: the grammar cannot be read as either, or a schema in it has numbers that are
            too large, or is nested too deeply.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return grammar  # `checked_size` refuses it
    try:
        if _LARK.search(grammar):
            return _with_fitted_schemas(grammar)
        return gbnf_to_lark(_PARTS.sub(lambda part: " |" if part["more"] else part[0], grammar))
    except RecursionError:
        raise
    except Exception as exc:  # gbnf_to_lark raises plain exceptions
        raise ValueError(str(exc)) from exc


def _with_fitted_schemas(grammar: str) -> str:
    """Return a Lark grammar whose JSON schemas llguidance follows correctly.

    Raises:
        ValueError: a schema is not JSON, has numbers that are too large, or is nested too deeply.
    """
    parts, end = [], 0
    while (part := _LARK_PARTS.search(grammar, end)) is not None:
        parts.append(grammar[end : part.end()])
        end = part.end()
        if part["json"]:
            try:
                schema, end = _decoder.raw_decode(grammar, end)
                allowed = fitted(with_definitions_moved(schema))
            except ValueError as exc:
                raise ValueError(f"%json: {exc}") from exc
            parts.append(grammar[part.end() : end] if allowed == schema else json.dumps(allowed))
    return "".join([*parts, grammar[end:]])
