"""Grammar rules of arguments: JSON, and Python's keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.lark_rules import LarkRules
from pagewire.shared.grammar.schema_fit import ANNOTATIONS, fitted
from pagewire.shared.tool_calls.argument_shapes import Shape, shape_of
from pagewire.shared.tool_calls.value_schemas import ValueSchemas, json_expression

MAX_ARGUMENTS = 33  # arguments of a call whose schema does not list its properties

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_NAMES = re.compile("[^a-z0-9]")  # characters that names of rules cannot have
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_PYTHON_CONSTANTS = {"boolean": '"True" | "False"', "null": '"None"'}


class Keywords:
    """The rules of keyword arguments such as `a=1, b="x"`, made from the schema of an object.

    Properties come in the schema's order, then any others that it allows.

    Property i has these rules: `p` (the keyword itself), `first` (keywords from i on, if none came
    before) and `more` (keywords from i on, each after a comma).

    Args:
        prefix: prefix of the rules' names.
        schema: schema of the object.
        rules: the grammar's rules, to which these are added.
        constants: constants are written as in Python: `True`, `None`.
        lenient: see `json_rule` and `shape_of`.
    """

    def __init__(
        self,
        prefix: str,
        schema: dict[str, Any],
        rules: LarkRules,
        constants: bool,
        lenient: bool = False,
    ) -> None:
        self._prefix, self._rules = prefix, rules
        self._shape = shape_of(schema, lenient)
        self._names = named(self._shape, _IDENTIFIER, lenient)
        self._values = ValueSchemas(schema, rules, lenient)
        self._constants = _PYTHON_CONSTANTS if constants else {}

    def add(self) -> str:
        """Add the rules; return the expression of the keywords, which may match no keyword."""
        shape, prefix, names = self._shape, self._prefix, self._names
        if shape.others is False:
            if not names:
                return ""
            first_other = more_other = '""'
        else:
            first_other, more_other = self._add_others()
        for index, name in enumerate(names):
            self._rules[f"{prefix}_p{index}"] = (
                f'"{name}=" {self._value(shape.properties[name], f"{prefix}_v{index}")}'
            )
            is_last = index == len(names) - 1
            first = first_other if is_last else f"{prefix}_first{index + 1}"
            more = more_other if is_last else f"{prefix}_more{index + 1}"
            rest = f"{prefix}_p{index} {more}".removesuffix(' ""')
            may_skip = name not in shape.required
            self._rules[f"{prefix}_first{index}"] = rest + (f" | {first}" if may_skip else "")
            if index:
                rest = f'", " {rest}' + (f" | {more}" if may_skip else "")
                self._rules[f"{prefix}_more{index}"] = rest
        return f"{prefix}_first0" if names else first_other

    def _value(self, schema: Any, rule: str) -> str:
        if isinstance(schema, dict) and set(schema) - ANNOTATIONS == {"type"}:
            kind = schema["type"]
            if isinstance(kind, str) and kind in self._constants:
                return f"({self._constants[kind]})"
        return self._values.add(rule, schema)

    def _add_others(self) -> tuple[str, str]:
        """Add the rules of other keywords; return their expressions: first, and after a comma."""
        value = self._value(self._shape.others, f"{self._prefix}_other_value")
        name = other_name("[A-Za-z_][A-Za-z0-9_]{0,63}", "=", self._names)
        keyword = f"{self._rules.add_shared(f'{self._prefix}_OTHER'.upper(), name)} {value}"
        most = MAX_ARGUMENTS
        return f'({keyword} (", " {keyword}){{0,{most}}})?', f'(", " {keyword}){{0,{most}}}'


def named(shape: Shape, right: re.Pattern[str], lenient: bool) -> list[str]:
    """Return the names of arguments, all of which a format of calls can express.

    Args:
        shape: the arguments.
        right: matches such names.
        lenient: other arguments are left out.

    Raises:
        ValueError: a name cannot be expressed.
    """
    names = [name for name in shape.properties if right.fullmatch(name)]
    if len(names) < len(shape.properties) and not lenient:
        wrong = next(name for name in shape.properties if not right.fullmatch(name))
        raise ValueError(f"this format of calls has no arguments with the name {wrong[:80]!r}")
    return names


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
