"""Parses one value, JSON or a Python literal, chunk by chunk, and returns it as strict JSON.

A pushdown automaton over characters: its output does not depend on how the text is split into
chunks. It stops at the first wrong character, or after the value.
"""

from __future__ import annotations

import json
import re
from typing import Literal

MAX_DEPTH = 64  # nested lists and objects; JSON parsers are recursive
MAX_WORD = 1024  # characters of a number; Python's `int` accepts up to 4300 digits

_PLAIN = re.compile(r"[^\"'\\]+")
_WORD = re.compile(r"[A-Za-z0-9_.+-]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEX = re.compile(r"[0-9a-fA-F]*")
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = _JSON_WORDS | {"True": "true", "False": "false", "None": "null"}
_JSON_ESCAPES = {char: "\\" + char for char in '"\\/bfnrt'}
_PYTHON_ESCAPES = {char: "\\" + char for char in '"\\bfnrt'} | {
    "'": "'",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSED_BY = {"{": "}", "[": "]", "(": ")"}

_Expected = Literal["value", "value or end", "key", "key or end", "colon", "next", "call"]


class ValueScanner:
    """Parses one value.

    Args:
        python: the value is a Python literal instead of JSON: it may have other quotes and escapes,
            `True`, `None`, and a comma before an end. White space becomes that of Python's `json`.
        call: the value is the arguments of a Python call, which become an object.

    Attributes:
        is_done: the value is complete; no more text is consumed.
        has_failed: the next character is wrong; no more text is consumed.
    """

    def __init__(self, python: bool = False, call: bool = False) -> None:
        self.is_done = self.has_failed = False
        self._python = python
        self._words = _PYTHON_WORDS if python else _JSON_WORDS
        self._escapes = _PYTHON_ESCAPES if python else _JSON_ESCAPES
        self._stack: list[str] = []  # the closing character of each open container
        self._expected: _Expected = "call" if call else "value"
        self._quote = ""  # quote of the open string
        self._is_key = False  # whether the open string is a key
        self._escape = ""  # incomplete escape, from its backslash
        self._word = ""  # incomplete number, constant or name
        self._has_comma = False  # consumed but not returned yet: an end may follow it

    @property
    def held(self) -> str:
        """Text that was consumed but not returned yet."""
        return ("," if self._has_comma else "") + self._word + self._escape

    def push(self, text: str, at: int = 0) -> tuple[str, int]:
        """Parse more text.

        Args:
            text: the next chunk.
            at: index in `text` at which to begin.

        Returns:
            JSON that is certain, and the index in `text` up to which it was consumed.
        """
        out: list[str] = []
        while at < len(text) and not (self.is_done or self.has_failed):
            if self._escape:
                at = self._take_escape(text[at], at, out)
            elif self._quote:
                at = self._take_string(text, at, out)
            elif self._word or self._begins_word(text[at]):
                at = self._take_word(text, at, out)
            else:
                at = self._take_mark(text[at], at, out)
        return "".join(out), at

    def _fail(self, at: int) -> int:
        self.has_failed = True
        return at

    def _take_string(self, text: str, at: int, out: list[str]) -> int:
        if (plain := _PLAIN.match(text, at)) is not None:
            out.append(escaped(plain[0]))
            return plain.end()
        char = text[at]
        if char == "\\":
            self._escape = char
        elif char != self._quote:  # the other kind of quote
            out.append(escaped(char))
        else:
            out.append('"')
            self._quote = ""
            if self._is_key:
                self._expected = "colon"
            else:
                self._after_value()
        return at + 1

    def _take_escape(self, char: str, at: int, out: list[str]) -> int:
        kind = self._escape[1:2]
        if not kind and char in _HEX_DIGITS and (self._python or char == "u"):
            self._escape += char
        elif not kind and char in self._escapes:
            out.append(self._escapes[char])
            self._escape = ""
        elif not kind and self._python:  # Python keeps the backslash
            out.append("\\\\" + escaped(char))
            self._escape = ""
        elif kind and _HEX.fullmatch(char):
            self._escape += char
            return at + 1 if self._end_hex(out) else self._fail(at + 1)
        else:
            return self._fail(at)
        return at + 1

    def _end_hex(self, out: list[str]) -> bool:
        """Return whether a numeric escape is valid so far; write it if it is complete."""
        digits = self._escape[2:]
        if len(digits) < _HEX_DIGITS[self._escape[1]]:
            return True
        code = int(digits, 16)
        if code > 0x10FFFF:
            return False
        out.append(f"\\u{digits}" if len(digits) == 4 else json.dumps(chr(code))[1:-1])
        self._escape = ""
        return True

    def _begins_word(self, char: str) -> bool:
        if _WORD.fullmatch(char) is None:
            return False
        is_name = self._expected in ("key", "key or end") and self._stack[-1] == ")"
        return is_name or self._expected in ("value", "value or end")

    def _take_word(self, text: str, at: int, out: list[str]) -> int:
        if (more := _WORD.match(text, at)) is not None:
            self._word += more[0]
            return more.end() if len(self._word) <= MAX_WORD else self._fail(more.end())
        word = self._word
        if self._expected in ("key", "key or end"):
            if _IDENTIFIER.fullmatch(word) is None:
                return self._fail(at)
            self._give_comma(out)
            out.append(f'"{word}"')
            self._expected = "colon"
        else:
            json_word = word if _NUMBER.fullmatch(word) else self._words.get(word)
            if json_word is None:
                return self._fail(at)
            self._give_comma(out)
            out.append(json_word)
            self._after_value()
        self._word = ""
        return at

    def _take_mark(self, char: str, at: int, out: list[str]) -> int:
        """Consume a space, a bracket, a quote, a comma or a colon."""
        expected = self._expected
        if char in " \t\r\n":
            out.append("" if self._python else char)
        elif expected == "colon":
            if char != ("=" if self._stack[-1] == ")" else ":"):
                return self._fail(at)
            out.append(": " if self._python else ":")
            self._expected = "value"
        elif self._stack and char == self._stack[-1] and self._may_close():
            self._has_comma = False
            out.append("}" if char == ")" else char)
            self._stack.pop()
            self._after_value()
        elif expected == "next":
            if char != ",":
                return self._fail(at)
            self._has_comma = True
            self._expected = "value" if self._stack[-1] == "]" else "key"
            if not self._python:
                self._give_comma(out)
        elif char == '"' or (char == "'" and self._python):
            if expected == "call" or (self._stack[-1:] == [")"] and expected != "value"):
                return self._fail(at)
            self._is_key = expected in ("key", "key or end")
            self._quote = char
            self._give_comma(out)
            out.append('"')
        else:
            return self._open(char, at, out)
        return at + 1

    def _open(self, char: str, at: int, out: list[str]) -> int:
        is_right = char == "(" if self._expected == "call" else char in ("{", "[")
        if not is_right or self._expected.startswith("key") or len(self._stack) >= MAX_DEPTH:
            return self._fail(at)
        self._give_comma(out)
        out.append("{" if char == "(" else char)
        self._stack.append(_CLOSED_BY[char])
        self._expected = "value or end" if char == "[" else "key or end"
        return at + 1

    def _may_close(self) -> bool:
        return self._expected in ("next", "value or end", "key or end") or (
            self._python and self._has_comma
        )

    def _give_comma(self, out: list[str]) -> None:
        if self._has_comma:
            out.append(", " if self._python else ",")
            self._has_comma = False

    def _after_value(self) -> None:
        self._expected = "next"
        self.is_done = not self._stack


def escaped(text: str) -> str:
    """Return text escaped for a JSON string; models do not escape line breaks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
