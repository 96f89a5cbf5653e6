"""The rules of one grammar in llguidance's dialect of Lark; their sizes are added up."""

from __future__ import annotations

import json
import re
from collections import UserDict
from collections.abc import Iterable, Sequence
from typing import Any

from pagewire.shared.request.structured_outputs import MAX_GRAMMAR_CHARS
from pagewire.shared.text.markers import Markers

# A grammar that is a little larger than a request may have is finished, and refused with its size.
MAX_MADE_CHARS = 4 * MAX_GRAMMAR_CHARS

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")


class LarkRules(UserDict[str, str]):
    """The expressions of rules, by name.

    The rule that makes the grammar far too large is refused, before others take memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_chars = 0
        self._shared: dict[str, str] = {}  # the name of a rule, by its expression

    def __setitem__(self, name: str, expression: str) -> None:
        """Add a rule.

        Raises:
            ValueError: the grammar becomes too large.
        """
        self._num_chars += len(name) + len(expression)
        check_size(self._num_chars)
        super().__setitem__(name, expression)

    def add_shared(self, name: str, expression: str) -> str:
        """Return the name of a rule with this expression, which is added if there is none yet."""
        if expression not in self._shared:
            self[name] = expression
            self._shared[expression] = name
        return self._shared[expression]

    def text(self, start: str, forces: bool = True) -> str:
        """Return the grammar whose answers the expression `start` describes.

        Args:
            start: the expression.
            forces: where only one text is possible, only the tokens are into which the tokenizer
                splits that text. Otherwise, the model chooses how it writes the text.
        """
        rules = {"start": start, **self}
        options = "{}" if forces else '{"no_forcing": true}'
        return f"%llguidance {options}\n" + "".join(
            f"{name}: {rule}\n" for name, rule in rules.items()
        )


def grammars_in(text: str) -> list[dict[str, Any]]:
    """Return the grammars of a grammar text: Lark, or JSON with a list; the first is the start."""
    try:
        grammars: list[dict[str, Any]] = json.loads(text)["grammars"]
    except (ValueError, LookupError, TypeError, RecursionError):  # Lark
        return [{"lark_grammar": text}]
    return grammars


def with_others(lark: str, others: Iterable[dict[str, Any]]) -> str:
    """Return the grammar text of a start in Lark, and other grammars to which it refers by name."""
    return json.dumps({"grammars": [{"lark_grammar": lark}, *others]})


def check_size(num_chars: int) -> None:
    """Check the size that a grammar has while it is made.

    Raises:
        ValueError: it is too large.
    """
    if num_chars > MAX_MADE_CHARS:
        raise ValueError(
            f"the grammar becomes too large: at most {MAX_GRAMMAR_CHARS} characters are possible"
        )


def literal(text: str, markers: Markers) -> str:
    """Return the expression of a text, in which special tokens are written as tokens."""
    parts = (
        f"<[{part}]>" if isinstance(part, int) else json_text(part) for part in markers.split(text)
    )
    return " ".join(parts)


def json_text(value: Any) -> str:
    """Return a value as JSON; a text in this form is a literal of Lark, too."""
    return json.dumps(value, ensure_ascii=False)


def one_of(expressions: Sequence[str]) -> str:
    """Return the expression of a choice between expressions."""
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def regex(pattern: str) -> str:
    """Return a regular expression as it is written in a rule."""
    return f"/{pattern}/"


def quoted(text: str) -> str:
    """Return a text escaped for a regular expression between slashes."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n")


def other_name(pattern: str, end: str, names: Iterable[str]) -> str:
    """Return the expression of the beginning of an argument that the schema does not list.

    Args:
        pattern: of the name.
        end: text after it.
        names: the names that the schema lists.
    """
    listed = "|".join(map(quoted, names))
    expression = regex(pattern + quoted(end))
    return f"{expression} & ~{regex(f'({listed}){quoted(end)}')}" if listed else expression
