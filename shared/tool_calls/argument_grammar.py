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


def add_keywords(
    prefix: str, schema: dict[str, Any], rules: LarkRules, constants: bool, lenient: bool
) -> str:
    """Add the rules of keyword arguments such as `a=1, b="x"`; return the expression of them all.

    It may match no keyword. Properties come in the schema's order, then any others that it allows.

    Args:
        prefix: prefix of the rules' names.
        schema: schema of the object.
        rules: the grammar's rules, to which these are added.
        constants: constants may be written as in Python: `True`, `None`.
        lenient: see `json_rule` and `shape_of`.
    """
    shape = shape_of(schema, lenient)
    names = named(shape, _IDENTIFIER, lenient)
    values: ValueSchemas | PythonValues = (
        PythonValues(f"{prefix}_n", schema, rules, lenient)
        if constants
        else ValueSchemas(schema, rules, lenient)
    )
    first_other = more_other = '""'
    if shape.others is not False:
        value = values.add(f"{prefix}_other_value", shape.others)
        excluded = (*names, *sorted(shape.excluded))
        other = other_name("[A-Za-z_][A-Za-z0-9_]{0,63}", "=", excluded)
        keyword = f"{rules.add_shared(f'{prefix}_OTHER'.upper(), other)} {value}"
        more_other = f'(", " {keyword}){{0,{MAX_ARGUMENTS}}}'
        first_other = f"({keyword} {more_other})?"
    elif not names:
        return ""
    keywords = [
        f'"{name}=" {values.add(f"{prefix}_v{index}", shape.properties[name])}'
        for index, name in enumerate(names)
    ]
    may_skip = [name not in shape.required for name in names]
    return add_chain(rules, prefix, keywords, may_skip, first_other, more_other)


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
