r"""Rewrites a JSON schema's patterns so that llguidance follows them correctly.

llguidance escapes the characters of a string class by class. If a class has all control characters,
or all but the line feed, it also allows an escaped `"` and an escaped backslash (1.9): `[^"]`
allows `\"`. A class without NUL is followed as it is written.
"""

from __future__ import annotations

import re

_NO_NUL = r"--\x00]"  # ends a class from which NUL is subtracted
# Classes that certainly have few control characters, Unicode classes, other escapes, the begin of a
# class (a `]` that follows it at once is a character), and all else.
_PARTS = re.compile(
    r"\[(?:\\[dws\W]|[^\\\[\]^\x00-\x1f])+\]|(?P<unicode>\\[pP](?:\{[^{}]*\}|.))|\\.|"
    r"(?P<begin>\[\^?(?:-+|\]?))|.",
    re.DOTALL,
)


def without_nul(pattern: str) -> str:
    """Return a pattern whose classes do not have NUL, for no answer needs it."""
    parts, depth = [], 0
    for part in _PARTS.finditer(pattern):
        text = part[0]
        if part["begin"]:
            text = text if depth else f"[{text}"
            depth += 1
        elif part["unicode"] and not depth:
            text = f"[{text}{_NO_NUL}"
        elif text == "]" and depth:
            depth -= 1
            text = text if depth else f"]{_NO_NUL}"
        parts.append(text)
    return "".join(parts)
