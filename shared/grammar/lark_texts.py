"""Grammars that a client writes itself: in Lark's syntax or GBNF's."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS

# Lark has a rule `start`, perhaps as `?start`; GBNF's rules have `::=`. Each line is read once.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|[?!]*start[^\s:]*[^\S\n]*:(?!:=))", re.MULTILINE)
# Parts of GBNF: a string or a class of characters; or spaces, with comments, and an alternative
# after them. llguidance takes an alternative that begins a line as a rule without a name.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|\[(?:\\.|[^\]\\\n])*\]?|(?P<spaces>(?:\s|#[^\n]*)+)(?P<more>\|?)'
)


def lark_text(grammar: str) -> str:
    """Return a grammar in Lark's or GBNF's syntax in that of Lark.

    Raises:
        ValueError: it is in neither.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return grammar  # is refused for that
    try:
        if _LARK.search(grammar):
            return grammar
        return gbnf_to_lark(_PARTS.sub(lambda part: " |" if part["more"] else part[0], grammar))
    except RecursionError:
        raise
    except Exception as exc:  # the reader of GBNF raises plain exceptions
        raise ValueError(str(exc)) from exc
