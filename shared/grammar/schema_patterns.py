r"""Rewrites a JSON schema's patterns so that llguidance follows them correctly.

llguidance escapes the characters of a string class by class. If a class has all control characters,
or all but the line feed, it also allows an escaped `"` and an escaped backslash (1.9): `[^"]`
allows `\"`. A class without NUL is followed as it is written.
"""

from __future__ import annotations

import re

_NO_NUL = r"--\x00]"  # ends a class from which NUL is subtracted
# Outside of classes: classes that certainly have few control characters, Unicode classes, other
# escapes, the begin of a class (a `]` that follows it at once is a character), and all else.
_PARTS = re.compile(
    r"\[(?:\\[dws\W]|[^\\\[\]^\x00-\x1f])+\]|(?P<unicode>\\[pP](?:\{[^{}]*\}|.))|\\.|"
    r"(?P<begin>\[\^?(?:-+|\]?))|.",
    re.DOTALL,
)
# In a class: operators, escapes that cannot begin a range, ranges (they may end with a `[`), other
# escapes, the begin of a class, its end, and all else.
_CLASS_PARTS = re.compile(
    r"&&|--|~~|\\[dDwW]|(?:\\.|[^\\\[\]-])-(?:\\.|[^\\\]-])|\\.|"
    r"(?P<begin>\[\^?(?:-+|\]?))|(?P<end>\])|.",
    re.DOTALL,
)


def without_nul(pattern: str) -> str:
    """Return a pattern whose classes do not have NUL, for no answer needs it.

    A pattern in which a class does not end is wrong; it is returned unchanged.
    """
    parts, depth, at = [], 0, 0
    while (part := (_CLASS_PARTS if depth else _PARTS).match(pattern, at)) is not None:
        text, at = part[0], part.end()
        if part["begin"]:
            if not depth:
                # In another class, `[:` without the backslash would begin a name.
                text = f"[{text}\\" if pattern.startswith(":", at) else f"[{text}"
            depth += 1
        elif depth and part["end"]:
            depth -= 1
            text = text if depth else f"]{_NO_NUL}"
        elif not depth and part["unicode"]:
            text = f"[{text}{_NO_NUL}"
        parts.append(text)
    return pattern if depth else "".join(parts)
