"""Parses one call of an answer, chunk by chunk: its name, then its arguments as JSON.

A reader consumes a text from its beginning, and leaves text that it cannot decide on yet. A call
has begun when its name is known to be a function of the request and its arguments have begun.

All readers have these attributes:

- name: name of the function; None until the call has begun.
- is_done: the call is complete; text after it is not consumed.
- has_failed: the text is not a call, or its arguments are wrong; the rest is not consumed.
- held: text of the arguments that was consumed but not returned yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Literal

from pagewire.shared.tool_calls.formats import ARGUMENT_KEYS, ToolFormat
from pagewire.shared.tool_calls.scanner import ValueScanner
from pagewire.shared.tool_calls.written_values import ParameterForms
from pagewire.shared.tool_calls.xml_calls import XmlCall

MAX_CALL_ID = 64  # characters
# Characters from a name to the beginning of arguments: they are parsed again with each chunk.
MAX_HEAD = 1024

_NAME_KEYS = ("name", "function", "tool_name")
_OWN_KEYS = (*_NAME_KEYS, "arguments")
_OTHER_KEYS = ("id", "type", "index", "tool_call_id")  # a call may have them; they are ignored
_NAME = re.compile(r"[A-Za-z0-9_.:-]*")
_CALL_ID = re.compile(rf"[A-Za-z0-9_-]{{0,{MAX_CALL_ID}}}")
# The beginning of a Python call's arguments, and a text that may become it.
_KEYWORDS = re.compile(r"\(\s*(?:\)|[A-Za-z_][A-Za-z0-9_]*\s*=)")
_KEYWORDS_BEGIN = re.compile(r"\(\s*(?:[A-Za-z_][A-Za-z0-9_]*\s*)?\Z")
_OBJECT = re.compile(r"\{")
_SPACES = " \t\r\n"


class ObjectCall:
    """`{"name": "f", "arguments": {...}}`, with keys in any order.

    The arguments may also be a string that contains the object, or null. Models that know OpenAI's
    tools write `{"type": "function", "function": {"name": "f", "arguments": {...}}}`, or the name
    as `function`; Cohere's write it as `tool_name`.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._names = names
        self._read_name: str | None = None  # the name, perhaps before the arguments begin
        # The arguments' JSON that was parsed before the call began, in parts.
        self._arguments: list[str] | None = None
        self._more = ""  # JSON of the arguments since then, not returned yet
        self._expected: Literal["{", "key or end", "key", ":", "value", "next"] = "{"
        self._key = ""  # a quote while the key is parsed
        self._is_inner = False  # inside the object `function`
        self._parts: list[str] = []  # parts of the key or value that is being parsed
        self._seen: set[str] = set()
        self._scanner = ValueScanner()

    @property
    def held(self) -> str:
        """Text of the arguments that was consumed but not returned yet."""
        return self._scanner.held

    def push(self, text: str) -> tuple[str, int]:
        """Return the next part of the arguments, and how many characters were consumed."""
        at = 0
        while at < len(text) and not (self.is_done or self.has_failed):
            is_in_key = self._key.startswith('"')
            if text[at] in _SPACES and not (is_in_key or self._parts):
                at += 1
            elif self._begins_inner(text[at]):
                self._is_inner, self._expected, self._key = True, "key or end", ""
                at += 1
            elif is_in_key or self._expected == "value":
                at = self._scan(text, at)
            else:
                at = self._take_mark(text[at], at)
        return self._give(), at

    def _begins_inner(self, char: str) -> bool:
        is_begin = self._expected == "value" and not self._parts and char == "{"
        return is_begin and self._key == "function" and not self._is_inner

    def _take_mark(self, char: str, at: int) -> int:
        expected = self._expected
        if expected == "{" and char == "{":
            self._expected = "key or end"
        elif expected.startswith("key") and char == '"':
            self._scanner = ValueScanner()
            self._key, _ = self._scanner.push(char)
            self._parts = [self._key]
        elif expected == ":" and char == ":":
            self._expected, self._parts, self._scanner = "value", [], ValueScanner()
        elif expected == "next" and char == ",":
            self._expected = "key"
        elif expected in ("next", "key or end") and char == "}":
            self._end()
            return at if self.has_failed else at + 1
        else:
            self._fail()
            return at
        return at + 1

    def _scan(self, text: str, at: int) -> int:
        """Parse more of a key or a value."""
        part, at = self._scanner.push(text, at)
        if self._expected == "value" and self._key in ARGUMENT_KEYS and self.name is not None:
            self._more += part
        elif part:
            self._parts.append(part)
            is_value = self._expected == "value" and self._key in ARGUMENT_KEYS
            if is_value and self._parts[0].startswith("{"):
                self._arguments = self._parts
        if self._scanner.has_failed:
            self._fail()
        elif self._scanner.is_done:
            if self._expected == "value":
                self._after_value()
            else:
                self._after_key()
        return at

    def _after_key(self) -> None:
        self._key = json.loads("".join(self._parts))
        self._expected, self._parts = ":", []
        kind = "arguments" if self._key in ARGUMENT_KEYS else self._key
        if kind in self._seen or kind not in (*_OWN_KEYS, *_OTHER_KEYS):
            self._fail()
        self._seen.add(kind)

    def _after_value(self) -> None:
        self._expected = "next"
        value = "".join(self._parts)
        if self._key in _NAME_KEYS:
            is_first = self._read_name is None
            # Grammars know a name only as it is, without escapes.
            self._read_name = next((name for name in self._names if value == f'"{name}"'), None)
            if self._read_name is None or not is_first:
                self._fail()
        elif self._key in ARGUMENT_KEYS:
            arguments = _as_object(value)
            self._arguments = None if arguments is None else [arguments]
            if arguments is None:
                self._fail()
        self._key, self._parts = "", []

    def _end(self) -> None:
        if self._is_inner:
            self._is_inner, self._expected = False, "next"
            return
        if self._arguments is None:
            self._arguments = ["{}"]
        if self._read_name is None:
            self._fail()
        else:
            self.is_done = True

    def _fail(self) -> None:
        """End the call; an error after the arguments, such as a missing bracket, is ignored."""
        is_in_arguments = self._expected == "value" and self._key in ARGUMENT_KEYS
        if self._read_name is None or self._arguments is None or is_in_arguments:
            self.has_failed = True
        else:
            self.is_done = True

    def _give(self) -> str:
        if self._read_name is None or self._arguments is None:
            return ""
        first = "".join(self._arguments) if self.name is None else ""
        self.name = self._read_name
        more, self._more = self._more, ""
        return first + more


class HeadedCall:
    """`f[ARGS]{...}`, perhaps with `[CALL_ID]` and an id after the name; or `f(a=1)`.

    Args:
        form: how the model writes calls.
        names: names of the functions that may be called.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._names, self._is_python = names, form.kind == "python"
        self._mark, self._id_mark = form.mark.strip(), form.id_mark
        self._scanner = ValueScanner(python=self._is_python, call=self._is_python)

    @property
    def held(self) -> str:
        """Text of the arguments that was consumed but not returned yet."""
        return self._scanner.held

    def push(self, text: str) -> tuple[str, int]:
        """Return the next part of the arguments, and how many characters were consumed."""
        at = 0
        if self.name is None:
            at = len(text) - len(text.lstrip())
            head = self._read_head(text, at)
            if head is None:
                self.has_failed |= len(text) - at > MAX_HEAD
                return "", at
            self.name, at = head
        part, at = self._scanner.push(text, at)
        self.is_done, self.has_failed = self._scanner.is_done, self._scanner.has_failed
        return part, at

    def _read_head(self, text: str, start: int) -> tuple[str, int] | None:
        """Return the name and where the arguments begin; None if that is not known yet."""
        name = _matched(_NAME, text, start)
        at = start + len(name)
        is_open = at == len(text)
        if not self._is_python:
            if self._id_mark and text.startswith(self._id_mark, at):
                at += len(self._id_mark)
                at += len(_matched(_CALL_ID, text, at))
            at += len(text[at:]) - len(text[at:].lstrip())
            if not text.startswith(self._mark, at):
                rest = text[at:]
                could = self._mark.startswith(rest) or self._id_mark.startswith(rest)
                self.has_failed = not (could and self._may_be(name, is_open))
                return None
            at += len(self._mark)
        at += len(text[at:]) - len(text[at:].lstrip())
        if at == len(text):
            self.has_failed = not self._may_be(name, self._is_python)
            return None
        begins = (_KEYWORDS if self._is_python else _OBJECT).match(text, at)
        if name in self._names and begins and begins.end() - start <= MAX_HEAD:
            return name, at
        may_begin = self._is_python and _KEYWORDS_BEGIN.match(text, at)
        self.has_failed = not (name in self._names and may_begin)
        return None

    def _may_be(self, name: str, is_open: bool) -> bool:
        """Whether a name is a function's, or the beginning of a function's name if it may go on."""
        if is_open:
            return any(tool_name.startswith(name) for tool_name in self._names)
        return name in self._names


CallReader = XmlCall | ObjectCall | HeadedCall


def make_reader(
    form: ToolFormat,
    names: Collection[str],
    forms: Mapping[str, ParameterForms],
    is_unopened: bool = False,
) -> CallReader:
    """Return a reader of one call.

    Args:
        form: how the model writes calls.
        names: names of the functions that may be called.
        forms: how the functions' arguments are written, for formats whose calls do not show it.
        is_unopened: nothing but the call itself says that it may be one.
    """
    if form.kind == "xml":
        return XmlCall(names, forms, is_unopened)
    if form.kind == "object":
        return ObjectCall(names)
    return HeadedCall(form, names)


def _matched(pattern: re.Pattern[str], text: str, at: int) -> str:
    match = pattern.match(text, at)
    return "" if match is None else match[0]


def _as_object(value: str) -> str | None:
    """Return arguments as a JSON object: a string may contain it, null means no arguments."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return None
    inner = json.loads(value)
    scanner = ValueScanner()
    text, at = scanner.push(inner.strip())
    is_whole = scanner.is_done and at == len(inner.strip())
    return text if is_whole and text.startswith("{") else None
