"""Grammar rules of arguments: JSON, Python's keyword arguments, and XML-like elements."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.lark_rules import LarkRules
from pagewire.shared.grammar.schema_fit import fitted
from pagewire.shared.tool_calls.value_schemas import ValueSchemas, json_expression
from pagewire.shared.tool_calls.xml_calls import PARAMETER, PARAMETER_END, ArgumentKind, kinds_in

MAX_ARGUMENTS = 33  # arguments of a call whose schema does not list its properties

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_NAMES = re.compile("[^a-z0-9]")  # characters that names of rules cannot have
_PATTERN_PARTS = re.compile(r"\\.|.", re.DOTALL)
# Parts of patterns that are written in another way: those that Lark escapes, and classes that have
# only ASCII characters, as in ECMAScript and in JSON here. Rust's have those of all of Unicode.
_WRITTEN = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"} | {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_PYTHON_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}
_MAX_LENGTH = 2048  # longest text whose length a grammar counts
_ELEMENT_NAME = re.compile(r"[^<>\s]{1,256}")
_VALUE_END = f"\n{PARAMETER_END}\n"


class Keywords:
    """The rules of keyword arguments such as `a=1, b="x"`, made from the schema of an object.

    Properties come in the schema's order. If the schema does not list all properties, or has names
    that are not identifiers of Python, any keywords with JSON values are allowed.

    Property i has these rules: `p` (the keyword itself), `first` (keywords from i on, if none came
    before) and `more` (keywords from i on, each after a comma).

    Args:
        prefix: prefix of the rules' names.
        schema: schema of the object.
        rules: the grammar's rules, to which these are added.
        constants: constants are written as in Python: `True`, `None`.
        lenient: see `json_rule`.
    """

    def __init__(
        self,
        prefix: str,
        schema: dict[str, Any],
        rules: LarkRules,
        constants: bool,
        lenient: bool = False,
    ) -> None:
        self._prefix, self._schema, self._rules = prefix, schema, rules
        self._values = ValueSchemas(schema, rules, lenient)
        self._constants = _PYTHON_CONSTANTS if constants else {}

    def add(self) -> str:
        """Add the rules; return the expression of the keywords, which may match no keyword."""
        properties: Any = self._schema.get("properties")
        if self._schema.get("additionalProperties") is not False or not _are_keywords(properties):
            return self._add_any()
        names, prefix = list(properties), self._prefix
        if not names:
            return ""
        needed = _required(self._schema)
        for index, name in enumerate(names):
            self._rules[f"{prefix}_p{index}"] = f'"{name}=" {self._value(properties[name], index)}'
            rest = f"{prefix}_p{index} {prefix}_more{index + 1}"
            is_last = index == len(names) - 1
            rest = f"{prefix}_p{index}" if is_last else rest
            skip = '""' if is_last else f"{prefix}_more{index + 1}"
            first = '""' if is_last else f"{prefix}_first{index + 1}"
            may_skip = name not in needed
            self._rules[f"{prefix}_first{index}"] = rest + (f" | {first}" if may_skip else "")
            if index:
                more = f'", " {rest}' + (f" | {skip}" if may_skip else "")
                self._rules[f"{prefix}_more{index}"] = more
        return f"{prefix}_first0"

    def _value(self, schema: Any, index: int) -> str:
        kind = schema.get("type") if isinstance(schema, dict) else None
        is_free = isinstance(schema, dict) and schema.keys().isdisjoint(("enum", "const"))
        if isinstance(kind, str) and kind in self._constants and is_free:
            return f"({self._constants[kind]})"
        return self._values.add(f"{self._prefix}_v{index}", schema)

    def _add_any(self) -> str:
        self._rules.setdefault("ANY_KEYWORD", regex("[A-Za-z_][A-Za-z0-9_]{0,63}="))
        self._rules.setdefault("any_value", json_rule({}))
        keyword = "ANY_KEYWORD any_value"
        return f'({keyword} (", " {keyword}){{0,{MAX_ARGUMENTS}}})?'


class Parameters:
    """The rules of arguments in elements, made from the schema of an object.

    Properties come in the schema's order. If the schema does not list all properties, any are
    allowed. For a text, `enum`, `const`, `minLength`, `maxLength` and `pattern` are followed. A
    value that may be text or JSON is any text.

    Args:
        prefix: prefix of the rules' names.
        schema: schema of the object.
        rules: the grammar's rules, to which these are added.
        lenient: see `json_rule`.
    """

    def __init__(
        self, prefix: str, schema: dict[str, Any], rules: LarkRules, lenient: bool = False
    ) -> None:
        self._prefix, self._schema, self._rules = prefix, schema, rules
        self._values = ValueSchemas(schema, rules, lenient)

    def add(self) -> str:
        """Add the rules; return the expression of the elements, which may match no element."""
        properties: Any = self._schema.get("properties")
        is_listed = self._schema.get("additionalProperties") is False
        if not is_listed or not isinstance(properties, dict):
            return self._add_any()
        if not all(map(_ELEMENT_NAME.fullmatch, properties)):
            return self._add_any()
        needed, kinds = _required(self._schema), kinds_in(self._schema)
        parts = []
        for index, (name, schema) in enumerate(properties.items()):
            rule = f"{self._prefix}_p{index}"
            value = self._value(schema, kinds.get(name), f"{self._prefix}_v{index}")
            self._rules[rule] = f"{_literal(f'{PARAMETER}{name}>' + chr(10))} {value}"
            parts.append(rule if name in needed else f"{rule}?")
        return " ".join(parts)

    def _value(self, schema: Any, kind: ArgumentKind | None, rule: str) -> str:
        """Add the rule of a value; return the expression of the value and its end tag."""
        if kind == "json":
            return f"{self._values.add(rule, schema)} {_literal(_VALUE_END)}"
        known = schema if kind == "text" and isinstance(schema, dict) else {}
        values = [known["const"]] if "const" in known else known.get("enum")
        if isinstance(values, list) and all(isinstance(each, str) for each in values):
            return f"({' | '.join(_literal(each + _VALUE_END) for each in values)})"
        self._rules[f"{rule}[lazy]"] = _text_value(known)
        return rule

    def _add_any(self) -> str:
        name = regex(rf"{quoted(PARAMETER)}[^<>\s]{{1,64}}>\n")
        self._rules.setdefault("ANY_PARAMETER", name)
        self._rules.setdefault("any_text[lazy]", _text_value({}))
        return f"(ANY_PARAMETER any_text){{0,{MAX_ARGUMENTS}}}"


def _text_value(schema: dict[str, Any]) -> str:
    """Return the expression of a text and its end tag.

    The conditions apply to the text alone: with the end tag in each, they would cost much more.
    """
    least, most = (_length(schema.get(key)) for key in ("minLength", "maxLength"))
    chars = f".{{{least or 0},{'' if most is None else most}}}"
    rules = [regex(f"(?s:{chars})"), "~" + regex(f"(?s:.*){quoted(PARAMETER_END)}(?s:.*)")]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        parts = _PATTERN_PARTS.findall(pattern)
        first, last = int(parts[:1] == ["^"]), len(parts) - (parts[-1:] == ["$"])
        before = "" if first else "(?s:.*)"
        after = "" if last < len(parts) else "(?s:.*)"
        inner = "".join(_WRITTEN.get(part, part) for part in parts[first:last])
        rules.append(regex(f"{before}({inner}){after}"))
    return f"({' & '.join(rules)}) {_literal(_VALUE_END)}"


def _length(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_LENGTH else None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _are_keywords(properties: Any) -> bool:
    return isinstance(properties, dict) and all(map(_IDENTIFIER.fullmatch, properties))


def rule_of_arguments(index: int, function: str) -> str:
    """Return the rule name of a function's arguments; error messages contain it."""
    return f"arguments_{index}_{_NOT_IN_NAMES.sub('_', function.lower())}"


@contextmanager
def schema_problems(rule: str) -> Iterator[None]:
    """Say which function's schema has a problem that the block finds.

    Args:
        rule: the result of `rule_of_arguments`.

    Raises:
        InvalidRequestError: no grammar can be made of the schema.
    """
    try:
        yield
    except ValueError as exc:
        raise InvalidRequestError(f"tools: {rule}: {exc}", "tools") from exc


def json_rule(schema: dict[str, Any], lenient: bool = False) -> str:
    """Return the expression of a value that follows a schema.

    Args:
        schema: schema of the value.
        lenient: keywords, numbers and formats that no grammar can express are ignored, and `oneOf`
            is `anyOf`.

    Raises:
        ValueError: the schema has numbers that no grammar can express, is nested too deeply, or has
            a text that UTF-8 cannot encode.
    """
    return json_expression(msgspec.json.encode(fitted(schema, lenient)).decode(), {}, lenient)


def regex(pattern: str) -> str:
    """Return a regular expression as it is written in a rule."""
    return f"/{pattern}/"


def quoted(text: str) -> str:
    """Return a text escaped for a regular expression between slashes."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n")
