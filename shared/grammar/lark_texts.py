"""Grammars that clients write, in the syntax of Lark or GBNF."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from pagewire.shared.structured_outputs import MAX_GRAMMAR_CHARS

# A Lark grammar has a rule `start` or `?start`; GBNF's rules have `::=`. Each line is read once.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|[?!]*start[^\s:]*[^\S\n]*:(?!:=))", re.MULTILINE)
# Parts of GBNF: a string, a character class, or spaces and comments with perhaps a `|` after them.
# llguidance mistakes a `|` at the beginning of a line for a rule without a name.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|\[(?:\\.|[^\]\\\n])*\]?|(?P<spaces>(?:\s|#[^\n]*)+)(?P<more>\|?)'
)


def lark_text(grammar: str) -> str:
    """Return a grammar in the syntax of Lark.

    Args:
        grammar: a grammar in the syntax of Lark or GBNF.

    Raises:
        ValueError: the grammar cannot be read as either.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return grammar  # `checked_size` refuses it
    try:
        if _LARK.search(grammar):
            return grammar
        return gbnf_to_lark(_PARTS.sub(lambda part: " |" if part["more"] else part[0], grammar))
    except RecursionError:
        raise
    except Exception as exc:  # gbnf_to_lark raises plain exceptions
        raise ValueError(str(exc)) from exc
