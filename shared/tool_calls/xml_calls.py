"""Parses one call whose arguments are XML-like elements, chunk by chunk, and returns JSON.

    <function=f>
    <parameter=a>
    text as it is, or JSON
    </parameter>
    </function>

A value itself does not show whether it is text or JSON; the function's schema does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pagewire.shared.text.stop_strings import overlap
from pagewire.shared.tool_calls.definitions import Function
from pagewire.shared.tool_calls.scanner import ValueScanner, escaped
from pagewire.shared.tool_calls.value_schemas import referred

# How a value is written. The value of a parameter that is not listed is text unless it is JSON.
ArgumentKind = Literal["text", "json"]
ArgumentKinds = Mapping[str, Mapping[str, ArgumentKind]]  # by function and parameter

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_TAG = 1024  # characters of a tag with a name

_CALL_END = "</tool_call>"  # models may forget to close the function first
_VALUE_END = "\n" + PARAMETER_END
_SPACES = " \t\r\n"
_MAX_DEPTH = 8  # of references and lists of alternatives that show how a value is written


def argument_kinds(function: Function) -> dict[str, ArgumentKind]:
    """Return how the values of a function's parameters are written, where its schema shows it."""
    return kinds_in(function.schema)


def kinds_in(schema: Mapping[str, Any]) -> dict[str, ArgumentKind]:
    """Return how the values of an object's properties are written, where its schema shows it."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    kinds = _Kinds(schema)
    found = {name: kinds.of(each) for name, each in properties.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


class _Kinds:
    """Finds how values are written.

    Args:
        root: the function's whole schema, for references.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # By a reference and how deep it is. Otherwise, a definition whose alternatives all refer to
        # itself would be read more often than any computer can.
        self._known: dict[tuple[str, int], ArgumentKind | None] = {}

    def of(self, schema: Any, depth: int = 0) -> ArgumentKind | None:
        """Return how values that follow a schema are written; None if they may be text or JSON.

        Args:
            schema: schema of one parameter.
            depth: how many references and lists of alternatives it is in.
        """
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return None
        if isinstance(reference := schema.get("$ref"), str):
            if (reference, depth) not in self._known:
                self._known[reference, depth] = self._referred(reference, depth + 1)
            return self._known[reference, depth]
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                return _common({self.of(each, depth + 1) for each in schema[key]})
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return _common({"text" if isinstance(each, str) else "json" for each in values})
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        if not all(isinstance(each, str) for each in names):
            return None
        return _common({"text" if each == "string" else "json" for each in names})

    def _referred(self, reference: str, depth: int) -> ArgumentKind | None:
        try:
            return self.of(referred(reference, self._root), depth)
        except LookupError:
            return None


def _common(kinds: Collection[ArgumentKind | None]) -> ArgumentKind | None:
    return next(iter(kinds)) if len(kinds) == 1 else None


class XmlCall:
    """Parses one call.

    Args:
        names: names of the functions that may be called.
        kinds: how the functions' arguments are written.
    """

    def __init__(self, names: Collection[str], kinds: ArgumentKinds) -> None:
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._names, self._kinds = names, kinds
        self._state: Literal["next", "begin", "text", "whole", "json", "end"] = "next"
        self._buffer = ""  # text that was consumed but not parsed yet; short
        self._keys: set[str] = set()
        self._kind: ArgumentKind | None = None  # kind of the current value
        self._parts: list[str] = []  # of the current value, if it is parsed as a whole
        self._scanner = ValueScanner(python=True)

    @property
    def held(self) -> str:
        """Text of the arguments that was consumed but not returned yet."""
        if self.has_failed:
            return self._buffer
        if self._state == "json":
            return self._scanner.held
        return escaped(self._buffer) if self._state == "text" else ""

    def push(self, text: str) -> tuple[str, int]:
        """Return the next part of the arguments, and how many characters were consumed."""
        at, out = 0, list[str]()
        if self.name is None:
            at = len(text) - len(text.lstrip())
            found = self._read_head(text[at : at + MAX_TAG])
            if found == 0:
                self.has_failed |= len(text) - at >= MAX_TAG
                return "", at
            at += found
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
            self.name = name[:end]
            return len(FUNCTION) + end + 1
        could = FUNCTION.startswith(begin) and (
            end < 0 and any(f"{each}>".startswith(name) for each in self._names)
        )
        self.has_failed = not could
        return 0

    def _step(self, out: list[str]) -> bool:
        """Parse more of the buffer; return whether to call this again."""
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
        return self._match_end()

    def _match_next(self, out: list[str]) -> bool:
        """Decide whether a parameter begins or the call ends."""
        self._buffer = self._buffer.lstrip(_SPACES)
        if self._buffer.startswith(PARAMETER):
            key, tag_end, _ = self._buffer[len(PARAMETER) : MAX_TAG].partition(">")
            if not tag_end:
                self.has_failed = len(self._buffer) >= MAX_TAG
                return False
            self.has_failed = key in self._keys
            if not self.has_failed:
                self._buffer = self._buffer[len(PARAMETER) + len(key) + 1 :]
                separator = ", " if self._keys else ""
                out.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                self._keys.add(key)
                self._kind = self._kinds.get(self.name or "", {}).get(key)
                self._state = "begin"
            return True
        for end in (FUNCTION_END, _CALL_END):
            if self._buffer.startswith(end):
                self._buffer = self._buffer[len(end) :]
                self.is_done = True
                out.append("}")
                return False
        could = any(each.startswith(self._buffer) for each in (PARAMETER, FUNCTION_END, _CALL_END))
        self.has_failed = not could
        return False

    def _begin_value(self, out: list[str]) -> bool:
        """Decide how a value is parsed; return False if none of its text has come yet."""
        if not self._buffer.removeprefix("\n"):
            return False
        self._buffer = self._buffer.removeprefix("\n")
        self._parts = []
        if self._kind == "text":
            self._state = "text"
            out.append('"')
        elif self._kind == "json" and self._buffer[0] in "[{":
            self._state, self._scanner = "json", ValueScanner(python=True)
        else:
            self._state = "whole"
            # This line break may belong to the end tag.
            self._buffer = "\n" + self._buffer
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
            value = "".join(self._parts)
            out.append(_as_json(value.removeprefix("\n"), self._kind))
            self._parts, self._state = [], "next"
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
        out.append(part)
        self._buffer = self._buffer[at:]
        self.has_failed = self._scanner.has_failed
        if self.has_failed:
            self._buffer = self._scanner.held + self._buffer
        elif self._scanner.is_done:
            self._state = "end"
        return self._scanner.is_done

    def _match_end(self) -> bool:
        """Consume the end tag of a JSON value."""
        self._buffer = self._buffer.lstrip(_SPACES)
        if self._buffer.startswith(PARAMETER_END):
            self._buffer = self._buffer[len(PARAMETER_END) :]
            self._state = "next"
            return True
        self.has_failed = not PARAMETER_END.startswith(self._buffer)
        return False


def _as_json(text: str, kind: ArgumentKind | None) -> str:
    """Return a value as JSON: converted if it is JSON or a Python literal, else as a string."""
    scanner = ValueScanner(python=True)
    out, at = scanner.push(text.strip() + "\n")
    is_value = scanner.is_done and at >= len(text.strip())
    if is_value and (kind == "json" or not out.startswith('"')):
        return out
    return f'"{escaped(text)}"'
