"""Grammars that a client writes itself: in Lark's syntax or GBNF's."""

from __future__ import annotations

from llguidance.gbnf_to_lark import any_to_lark

from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS


def lark_text(grammar: str) -> str:
    """Return a grammar in Lark's or GBNF's syntax in that of Lark.

    Raises:
        ValueError: it is in neither.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return grammar  # is refused for that
    try:
        return any_to_lark(grammar)
    except RecursionError:
        raise
    except Exception as exc:  # the reader of GBNF raises plain exceptions
        raise ValueError(str(exc)) from exc
