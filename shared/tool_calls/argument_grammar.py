"""Grammar rules of arguments: JSON, and Python's keyword arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.grammar.lark_rules import LarkRules, other_name
from pagewire.shared.grammar.schema_fit import fitted
from pagewire.shared.tool_calls.argument_shapes import ArgumentShape, shape_of
from pagewire.shared.tool_calls.python_values import PythonValues, add_chain
from pagewire.shared.tool_calls.value_schemas import ValueSchemas, json_expression

MAX_ARGUMENTS = 33  # arguments of a call whose schema does not list its properties

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_NAMES = re.compile("[^a-z0-9]")  # characters that names of rules cannot have


class KeywordRules:
    """The rules of keyword arguments such as `a=1, b="x"`, made from the schema of an object.

    Properties come in the schema's order, then any others that it allows.

    Args:
        prefix: prefix of the rules' names.
        schema: schema of the object.
        rules: the grammar's rules, to which these are added.
        constants: constants may be written as in Python: `True`, `None`.
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
        self._values: ValueSchemas | PythonValues = (
            PythonValues(f"{prefix}_n", schema, rules, lenient)
            if constants
            else ValueSchemas(schema, rules, lenient)
        )

    def add(self) -> str:
        """Add the rules; return the expression of the keywords, which may match no keyword."""
        shape, prefix, names = self._shape, self._prefix, self._names
        if shape.others is False:
            if not names:
                return ""
            first_other = more_other = '""'
        else:
            first_other, more_other = self._add_others()
        keywords = [
            f'"{name}=" {self._values.add(f"{prefix}_v{index}", shape.properties[name])}'
            for index, name in enumerate(names)
        ]
        may_skip = [name not in shape.required for name in names]
        return add_chain(self._rules, prefix, keywords, may_skip, first_other, more_other)

    def _add_others(self) -> tuple[str, str]:
        """Add the rules of other keywords; return their expressions: first, and after a comma."""
        value = self._values.add(f"{self._prefix}_other_value", self._shape.others)
        name = other_name(
            "[A-Za-z_][A-Za-z0-9_]{0,63}", "=", (*self._names, *sorted(self._shape.excluded))
        )
        keyword = f"{self._rules.add_shared(f'{self._prefix}_OTHER'.upper(), name)} {value}"
        most = MAX_ARGUMENTS
        return f'({keyword} (", " {keyword}){{0,{most}}})?', f'(", " {keyword}){{0,{most}}}'


def named(shape: ArgumentShape, right: re.Pattern[str], lenient: bool) -> list[str]:
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
