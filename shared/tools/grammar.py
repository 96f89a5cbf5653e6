"""What an answer with tool calls may be, as a grammar for llguidance: text in its syntax of Lark.

- A required or named call: nothing but calls, after the reasoning if the model writes any.
- `auto`: free text, or text and then calls. Once a call has begun, it is one of the request's
  functions and its arguments follow the schema. Text that only begins like a call is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from pagewire.shared.tools.definitions import Function
from pagewire.shared.tools.formats import ARGS_MARK, TokenOf, ToolFormat
from pagewire.shared.tools.reasoning import Begins, ReasoningFormat

MAX_CALLS = 32  # in one answer, so that a model that repeats itself comes to an end

# Spaces as models are trained to write JSON: Python's. Fixed, so that none goes on for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_ANY_OBJECT = {"type": "object"}
_PYTHON_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}


class CallsWanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls an answer may have.

    Attributes:
        functions: that may be called.
        must_call: nothing but calls; otherwise the model chooses.
        only_one: at most one call.
        is_named: the request names the function.
    """

    functions: tuple[Function, ...]
    must_call: bool
    only_one: bool
    is_named: bool = False


def tools_grammar(
    form: ToolFormat,
    wanted: CallsWanted,
    reasoning: ReasoningFormat | None,
    begins: Begins,
    token_of: TokenOf,
) -> str:
    """Return the grammar of an answer.

    Args:
        form: how the model writes calls.
        wanted: which calls.
        reasoning: how it writes reasoning, if it does.
        begins: whether the prompt has opened the reasoning.
        token_of: the id of a marker that is a token, None for text.
    """
    return _Grammar(form, wanted, reasoning, begins, token_of).text()


class _Grammar:
    """The rules of one grammar."""

    def __init__(
        self,
        form: ToolFormat,
        wanted: CallsWanted,
        reasoning: ReasoningFormat | None,
        begins: Begins,
        token_of: TokenOf,
    ) -> None:
        self._form, self._wanted, self._token_of = form, wanted, token_of
        self._reasoning, self._begins = reasoning, begins
        self._rules: dict[str, str] = {}

    def text(self) -> str:
        """Return the grammar."""
        before = self._add_reasoning()
        calls = self._add_calls()
        if self._wanted.must_call:
            start = f"{before} {calls}"
        else:
            start = f"{before} ({self._add_text()} | {self._add_triggered()})"
        rules = {"start": start, **self._rules}
        return "%llguidance {}\n" + "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _literal(self, text: str) -> str:
        """Return a text as it is in a rule; a marker in it that is a token is one."""
        core = text.strip()
        token = self._token_of(core) if core else None
        if token is None:
            return json.dumps(text, ensure_ascii=False) if text else ""
        before, after = text[: text.index(core)], text[text.index(core) + len(core) :]
        parts = [json.dumps(before) if before else "", f"<[{token}]>"]
        return " ".join([*parts, json.dumps(after) if after else ""]).strip()

    def _until(self, name: str, marker: str, excluded: Sequence[str] = ()) -> str:
        """Return what reads any text up to a marker, and the marker.

        Args:
            name: of the rule.
            marker: as in the format.
            excluded: what the text does not begin with.
        """
        core = marker.strip()
        rest = self._literal(marker[marker.index(core) + len(core) :])
        if (token := self._token_of(core)) is not None:
            self._rules[name.upper()] = _text("", excluded)
            return f"{name.upper()} <[{token}]> {rest}".strip()
        self._rules[f"{name}[lazy]"] = _text(_quoted(core), excluded)
        return f"{name} {rest}".strip()

    def _add_reasoning(self) -> str:
        form = self._reasoning
        if form is None:
            return ""
        rest = self._until("reasoning_end", form.close)
        opened = self._literal(form.open)
        self._rules["LINE_BREAKS"] = _regex(r"\n{1,8}")
        if self._begins == "inside":
            return f"{rest} LINE_BREAKS?"
        self._rules["reasoning"] = f"{opened} {rest} LINE_BREAKS?"
        return "reasoning?"

    def _add_calls(self) -> str:
        """Add the rules of calls; return the name of the one that reads all."""
        form = self._form
        self._rules["call"] = " | ".join(
            self._add_function(index, each) for index, each in enumerate(self._wanted.functions)
        )
        marker, close = self._literal(form.open), self._literal(form.close)
        separator = self._literal(form.separator)
        if form.is_list:
            more = self._repeated(f"{separator} call")
            self._rules["listed"] = f"{self._literal(form.begin)} call {more} {self._end()}"
            self._rules["calls"] = f"{self._may_open()} {marker} listed"
        else:
            self._rules["closed"] = f"call {close}"
            more = self._repeated(f"{separator} {marker} closed")
            self._rules["calls"] = f"{marker} closed {more}"
        return "calls"

    def _may_open(self) -> str:
        """Return what may come first; a model whose tokenizer lacks the token never writes it."""
        marker = self._form.may_open
        return f"{self._literal(marker)}?" if marker and self._token_of(marker) is not None else ""

    def _end(self) -> str:
        return f"{self._literal(self._form.end)} {self._literal(self._form.close)}".strip()

    def _repeated(self, more: str) -> str:
        return "" if self._wanted.only_one else f"({more}){{0,{MAX_CALLS - 1}}}"

    def _add_triggered(self) -> str:
        """Add the rule of text and calls after it; return what reads them."""
        form = self._form
        if not form.open:
            # One terminal of the grammar: otherwise the bracket alone would already be text.
            first = " | ".join(
                f"{self._literal(form.begin + self._head(each))} body_{index}"
                for index, each in enumerate(self._wanted.functions)
            )
            more = self._repeated(f"{self._literal(form.separator)} call")
            return f"{self._may_open()} ({first}) {more} {self._end()}"
        trigger = self._until("call_begin", form.open, self._reasoning_open())
        if form.is_list:
            return f"{trigger} listed"
        more = self._repeated(f"{self._literal(form.separator)} {self._literal(form.open)} closed")
        return f"{trigger} closed {more}"

    def _reasoning_open(self) -> list[str]:
        """Return the tag that begins reasoning, if text could begin with it as well."""
        form = self._reasoning
        if form is None or self._begins == "inside" or self._token_of(form.open) is not None:
            return []
        return [form.open]

    def _add_text(self) -> str:
        """Add what is only text; return its name."""
        excluded = self._reasoning_open()
        if not self._form.open:
            functions = self._wanted.functions
            excluded += [self._form.begin + self._head(function) for function in functions]
            if self._reasoning is not None:
                excluded.append("\n")  # else the line breaks before a call would begin a text
        self._rules["TEXT"] = _text("", excluded)
        return "TEXT"

    def _head(self, function: Function) -> str:
        name = function.name
        if self._form.kind == "object":
            return f'{{"name": "{name}", "{self._form.arguments_key}": '
        return f"{name}(" if self._form.kind == "python" else name

    def _add_function(self, index: int, function: Function) -> str:
        """Add the rules of a function's arguments; return what reads a call of it."""
        body = f"body_{index}"
        if self._form.kind == "python":
            arguments = _Keywords(body, function.schema, self._rules).add()
            self._rules[body] = f'{arguments} ")"'
        else:
            mark = self._literal(ARGS_MARK) if self._form.kind == "headed" else ""
            end = '"}"' if self._form.kind == "object" else ""
            self._rules[f"arguments_{index}"] = _json_rule(function.schema)
            self._rules[body] = f"{mark} arguments_{index} {end}".strip()
        return f"{self._literal(self._head(function))} {body}"


class _Keywords:
    """The rules of `a=1, b="x"`, from the schema of an object.

    Properties come in the schema's order. A schema that does not list them itself, or has names
    that are not Python's, allows any keywords with values as in JSON.

    For the property i there are these rules: `p` (the keyword itself), `first` (the keywords from i
    on, none before them) and `more` (the same after a comma).

    Args:
        prefix: of the rules' names.
        schema: of the object.
        rules: to add to.
    """

    def __init__(self, prefix: str, schema: dict[str, Any], rules: dict[str, str]) -> None:
        self._prefix, self._schema, self._rules = prefix, schema, rules

    def add(self) -> str:
        """Add the rules; return what reads the keywords, perhaps none."""
        properties: Any = self._schema.get("properties")
        if self._schema.get("additionalProperties") is not False or not _are_keywords(properties):
            return self._add_any()
        names, prefix = list(properties), self._prefix
        if not names:
            return ""
        required = self._schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        for index, name in enumerate(names):
            self._rules[f"{prefix}_p{index}"] = f'"{name}=" {self._value(properties[name], index)}'
            rest = f"{prefix}_p{index} {prefix}_more{index + 1}"
            is_last = index == len(names) - 1
            rest = f"{prefix}_p{index}" if is_last else rest
            skip = '""' if is_last else f"{prefix}_more{index + 1}"
            first = '""' if is_last else f"{prefix}_first{index + 1}"
            may_skip = name not in needed
            self._rules[f"{prefix}_first{index}"] = rest + (f" | {first}" if may_skip else "")
            self._rules[f"{prefix}_more{index}"] = f'", " {rest}' + (
                f" | {skip}" if may_skip else ""
            )
        del self._rules[f"{prefix}_more0"]
        return f"{prefix}_first0"

    def _value(self, schema: Any, index: int) -> str:
        kind = schema.get("type") if isinstance(schema, dict) else None
        if isinstance(kind, str) and kind in _PYTHON_CONSTANTS and "enum" not in schema:
            return f"({_PYTHON_CONSTANTS[kind]})"
        shared: dict[str, Any] = {
            key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema
        }
        rule = f"{self._prefix}_v{index}"
        self._rules[rule] = _json_rule({**shared, **schema} if isinstance(schema, dict) else {})
        return rule

    def _add_any(self) -> str:
        self._rules.setdefault("ANY_KEYWORD", _regex("[A-Za-z_][A-Za-z0-9_]{0,63}="))
        self._rules.setdefault("any_value", _json_rule({}))
        keyword = "ANY_KEYWORD any_value"
        return f'({keyword} (", " {keyword}){{0,{MAX_CALLS}}})?'


def _are_keywords(properties: Any) -> bool:
    return isinstance(properties, dict) and all(map(_IDENTIFIER.fullmatch, properties))


def _json_rule(schema: dict[str, Any]) -> str:
    options = msgspec.json.encode({**schema, "x-guidance": _JSON_STYLE}).decode()
    return f"%json {options}"


def _regex(pattern: str) -> str:
    return f"/{pattern}/"


def _text(end: str, excluded: Sequence[str]) -> str:
    """Return a regular expression of any text with this end that begins with no excluded text.

    Spaces before an excluded text are ignored, as the parser does.
    """
    text = _regex(f"(?s:.*){end}")
    if not excluded:
        return text
    any_of = "|".join(map(_quoted, excluded))
    wrong = _regex(r"[ \t\r\n]*" + f"(?:{any_of})(?s:.*)")
    return f"{text} & ~{wrong}"


def _quoted(text: str) -> str:
    """Return a text as it is in a regular expression between slashes."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n")


def any_arguments(functions: Sequence[Function]) -> tuple[Function, ...]:
    """Return functions whose arguments are any object: for schemas that grammars cannot express."""
    return tuple(
        msgspec.structs.replace(function, parameters=_ANY_OBJECT) for function in functions
    )
