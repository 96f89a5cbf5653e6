"""Parses one call whose arguments are XML-like elements, chunk by chunk, and returns JSON.

    <function=f>
    <parameter=a>
    text as it is, or JSON
    </parameter>
    </function>

A value itself does not show whether it is text or JSON; the function's schema does, see
`written_values.py`. If a parameter is repeated, the first value counts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Literal

from pagewire.shared.text.stop_strings import overlap
from pagewire.shared.tool_calls.scanner import ValueScanner, escaped
from pagewire.shared.tool_calls.written_values import ANY_VALUE, NULLS, ParameterForms

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_TAG = 1024  # characters of a tag with a name

_CALL_END = "</tool_call>"  # models may forget to close the function first
_VALUE_END = "\n" + PARAMETER_END
_SPACES = " \t\r\n"
_MAX_SPACES = 64  # before a value that is not text
_NO_FORMS = ParameterForms()


class XmlCall:
    """Parses one call.

    Args:
        names: names of the functions that may be called.
        forms: how the functions' arguments are written, by function.
        is_unopened: nothing but the call itself says that it may be one, so a line must end after
            the name: a text may mention `<function=f>`.
    """

    def __init__(
        self,
        names: Collection[str],
        forms: Mapping[str, ParameterForms],
        is_unopened: bool = False,
    ) -> None:
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._names, self._forms, self._is_unopened = names, forms, is_unopened
        self._state: Literal["next", "begin", "text", "whole", "json", "end"] = "next"
        self._buffer = ""  # text that was consumed but not parsed yet; short
        self._keys: set[str] = set()
        self._form = ANY_VALUE  # form of the current value
        self._is_dropped = False  # whether the current value is of an earlier parameter
        self._parts: list[str] = []  # parts of the current value, if it is parsed as a whole
        self._raw: list[str] | None = None  # text of a value that is JSON so far, or text
        self._scanner = ValueScanner(python=True)

    @property
    def held(self) -> str:
        """Text of the arguments that was consumed but not returned yet."""
        if self.has_failed:
            return self._buffer
        if self._is_dropped:
            return ""
        if self._state == "json":
            return self._scanner.held if self._raw is None else ""
        return escaped(self._buffer) if self._state == "text" else ""

    def push(self, text: str) -> tuple[str, int]:
        """Return the next part of the arguments, and how many characters were consumed."""
        at, out = 0, list[str]()
        if self.name is None:
            at = len(text) - len(text.lstrip())
            head = self._read_head(text[at : at + MAX_TAG])
            if head == 0:
                self.has_failed |= len(text) - at >= MAX_TAG
                return "", at
            at += head
            out.append("{")
        self._buffer += text[at:]
        while not (self.is_done or self.has_failed) and self._step(out):
            pass
        if not self.is_done:
            return "".join(out), len(text)
        rest, self._buffer = self._buffer, ""
        return "".join(out), len(text) - len(rest)

    def _read_head(self, text: str) -> int:
        """Return the length of the tag with the name; 0 if it is incomplete or wrong."""
        begin, name = text[: len(FUNCTION)], text[len(FUNCTION) :]
        end = name.find(">")
        if begin == FUNCTION and end >= 0 and name[:end] in self._names:
            if self._is_unopened and not name.startswith("\n", end + 1):
                self.has_failed = len(name) > end + 1
                return 0
            self.name = name[:end]
            return len(FUNCTION) + end + 1
        could = FUNCTION.startswith(begin) and (
            end < 0 and any(f"{tool_name}>".startswith(name) for tool_name in self._names)
        )
        self.has_failed = not could
        return 0

    def _step(self, out: list[str]) -> bool:
        """Parse more of the buffer; return whether to call this again."""
        if self._is_dropped and self._state != "next":
            out = []
        match self._state:
            case "next":
                return self._match_next(out)
            case "begin":
                return self._begin_value(out)
            case "text":
                return self._take_text(out)
            case "whole":
                return self._take_whole(out)
            case "json":
                return self._take_json(out)
        return self._match_end(out)

    def _match_next(self, out: list[str]) -> bool:
        """Decide whether a parameter begins or the call ends."""
        self._buffer = self._buffer.lstrip(_SPACES)
        if self._buffer.startswith(PARAMETER):
            key, tag_end, _ = self._buffer[len(PARAMETER) : MAX_TAG].partition(">")
            if not tag_end:
                self.has_failed = len(self._buffer) >= MAX_TAG
                return False
            self._buffer = self._buffer[len(PARAMETER) + len(key) + 1 :]
            self._is_dropped = key in self._keys
            if not self._is_dropped:
                separator = ", " if self._keys else ""
                out.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            self._keys.add(key)
            self._form = self._forms.get(self.name or "", _NO_FORMS).of(key)
            self._state = "begin"
            return True
        for end in (FUNCTION_END, _CALL_END):
            if self._buffer.startswith(end):
                self._buffer = self._buffer[len(end) :]
                self.is_done = True
                out.append("}")
                return False
        could = any(
            marker.startswith(self._buffer) for marker in (PARAMETER, FUNCTION_END, _CALL_END)
        )
        self.has_failed = not could
        return False

    def _begin_value(self, out: list[str]) -> bool:
        """Decide how a value is parsed; return False if that is not known yet."""
        text, form = self._buffer.removeprefix("\n"), self._form
        start = text.lstrip()
        if not text or (not start and len(text) <= _MAX_SPACES):
            return False
        self._parts, self._raw = [], None
        if form.any_text:
            is_null = "null" in form.others and any(word.startswith(start[:4]) for word in NULLS)
            if is_null and len(start) < 4:  # the length of both words
                return False
            if start and start[0] in form.containers:
                self._state, self._scanner, self._raw = "json", ValueScanner(python=True), []
            elif start and is_null:
                self._state = "whole"
            else:
                self._state = "text"
                out.append('"')
        elif start[:1] in ("[", "{") and not form.texts:
            self._state, self._scanner = "json", ValueScanner(python=True)
        else:
            self._state = "whole"
        self._buffer = text
        return True

    def _take_text(self, out: list[str]) -> bool:
        part, is_whole = self._until_end()
        out.append(escaped(part))
        if is_whole:
            out.append('"')
            self._state = "next"
        return is_whole

    def _take_whole(self, out: list[str]) -> bool:
        part, is_whole = self._until_end()
        self._parts.append(part)
        if is_whole:
            out.append(self._form.as_json("".join(self._parts)))
            self._state = "next"
        return is_whole

    def _until_end(self) -> tuple[str, bool]:
        """Return the next part of a text, and whether its end tag was consumed."""
        part, end, rest = self._buffer.partition(PARAMETER_END)
        if end:
            self._buffer = rest
            return part.removesuffix("\n"), True
        held = max(overlap(part, _VALUE_END), overlap(part, PARAMETER_END))
        self._buffer = part[len(part) - held :]
        return part[: len(part) - held], False

    def _take_json(self, out: list[str]) -> bool:
        part, at = self._scanner.push(self._buffer)
        if self._raw is None:
            out.append(part)
        else:
            self._parts.append(part)
            self._raw.append(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if self._scanner.has_failed:
            if self._raw is not None:
                return self._begin_text(out, self._raw)
            self.has_failed = True
            self._buffer = self._scanner.held + self._buffer
        elif self._scanner.is_done:
            self._state = "end"
        return self._scanner.is_done

    def _begin_text(self, out: list[str], raw: list[str]) -> bool:
        """Parse a value again, as text: what began like JSON is something else."""
        self._buffer = "".join((*raw, self._buffer))
        self._state, self._raw = "text", None
        out.append('"')
        return True

    def _match_end(self, out: list[str]) -> bool:
        """Consume the end tag of a JSON value."""
        start = self._buffer.lstrip(_SPACES)
        if self._raw is not None:
            self._raw.append(self._buffer[: len(self._buffer) - len(start)])
        self._buffer = start
        if start.startswith(PARAMETER_END):
            self._buffer = start[len(PARAMETER_END) :]
            self._state = "next"
            out += self._parts
            return True
        if PARAMETER_END.startswith(start):
            return False
        if self._raw is not None:
            return self._begin_text(out, self._raw)
        self.has_failed = True
        return False
