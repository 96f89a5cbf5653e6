"""Limits the character classes of clients' regular expressions to ASCII."""

from __future__ import annotations

import re

# As in the patterns of JSON schemas, and as vLLM's default backend has them. In Rust's syntax these
# classes may also be within another one.
ASCII = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[\t-\r\x20]",
    r"\S": r"[^\t-\r\x20]",
}
_ESCAPE = re.compile(r"\\.", re.DOTALL)


def in_ascii(regex: str) -> str:
    r"""Return a regular expression in which \d, \w and \s stand for characters of ASCII alone."""
    return _ESCAPE.sub(lambda match: ASCII.get(match[0], match[0]), regex)
