"""Rules for the fields of a struct, as texts and as checks, from their declared types.

A type's bounds and its rule in words are declared once:

    Annotated[int, Meta(ge=1, le=16, description="an integer from 1 to 16")]

msgspec checks what arrives as JSON, `check_fields` what is made in Python.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import Meta, inspect
from msgspec.structs import FieldInfo

from pagewire.shared.base.errors import InvalidRequestError

_PLAIN_RULES: dict[type[inspect.Type], str] = {
    inspect.BoolType: "a boolean",
    inspect.DictType: "an object",
    inspect.FloatType: "a number",
    inspect.IntType: "an integer",
    inspect.ListType: "a list",
    inspect.StrType: "a string",
    inspect.StructType: "an object",
    inspect.VarTupleType: "a list",
}
# Where msgspec says that an item of a list is wrong.
_WRONG_ITEM = re.compile(r"at `\$\[(\d+)\]")


class CheckedStruct(type(msgspec.Struct)):  # type: ignore[misc]  # msgspec does not name its type
    """The metaclass of a struct whose constructor checks names and values of its fields."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """Make a struct.

        Raises:
            InvalidRequestError: it has no field of a name, and the error has the nearest one, or
                all; or a value is wrong, see `check_fields`.
        """
        known = cls.__struct_fields__
        for name in fields:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(known)}"
                raise InvalidRequestError(f"{cls.__name__} has no field {name}; {hint}", name)
        made = super().__call__(*args, **fields)
        check_fields(made)
        return made


def of_chars(low: int, high: int) -> Meta:
    """Return the bounds of a string's length, with the rule in words."""
    length = f"{low} to" if low else "at most"
    return _sized(low, high, f"a string of {length} {high} characters")


def of_items(low: int, high: int, items: str) -> Meta:
    """Return the bounds of a list's length, with the rule in words.

    Args:
        low: items at least.
        high: items at most.
        items: what they are.
    """
    length = f"{low} to" if low else "at most"
    return _sized(low, high, f"a list of {length} {high} {items}")


def of_numbers(low: int, high: int) -> Meta:
    """Return the bounds of an integer, with the rule in words."""
    return Meta(ge=low, le=high, description=f"an integer from {low} to {high}")


def _sized(low: int, high: int, rule: str) -> Meta:
    return Meta(min_length=low or None, max_length=high, description=rule)


@cache
def field_types(kind: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    """Return the type of each field, by its name."""
    fields = msgspec.structs.fields(kind)
    types = inspect.multi_type_info([field.type for field in fields])
    return dict(zip((field.encode_name for field in fields), types, strict=True))


def check_fields(values: msgspec.Struct) -> None:
    """Check all fields of a struct that was made in Python, where nothing checks types.

    Fields of structs inside it are not checked.

    Raises:
        InvalidRequestError: a field has a wrong type or is out of range; names it.
    """
    try:
        msgspec.convert(msgspec.structs.asdict(values), type(values))
    except msgspec.ValidationError:  # or a type that msgspec does not take, such as a range
        types = field_types(type(values)).values()
        for field, kind in zip(msgspec.structs.fields(type(values)), types, strict=True):
            _check_field(field, kind, getattr(values, field.name))


def _check_field(field: FieldInfo, kind: inspect.Type, value: Any) -> None:
    is_struct = any(isinstance(choice, inspect.StructType) for choice in _alternatives(kind))
    if is_struct and isinstance(value, dict):
        return  # its own fields are checked where it is read
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if isinstance(value, float):
        value = float(value)  # numpy's floats are floats, which msgspec does not know
    try:
        msgspec.convert(list(value) if is_list else value, field.type)
    except msgspec.ValidationError as exc:
        wrong = _WRONG_ITEM.search(str(exc)) if is_list else None
        item = [] if wrong is None else [int(wrong[1])]
        path, (depth, rule) = field.name, rule_at(kind, item)
        for index in item[:depth]:
            path, value = f"{path}[{index}]", value[index]
        problem = f"{path} must be {rule}, not {reprlib.repr(value)}"
        raise InvalidRequestError(problem, field.name) from exc


def rule_at(kind: inspect.Type, path: Sequence[str | int]) -> tuple[int, str]:
    """Return the rule for the value at a path inside a type.

    A union that has a description is described as a whole, whatever the path has after it.

    Args:
        kind: of the whole.
        path: names of fields and indexes in lists.

    Returns:
        How many parts of the path lead to what is described, and the rule in words.
    """
    for depth, part in enumerate(path):
        if _is_whole(kind) or (inner := _inner(kind, part)) is None:
            return depth, _rule(kind)
        kind = inner
    return len(path), _rule(kind)


def _inner(kind: inspect.Type, part: str | int) -> inspect.Type | None:
    for choice in _alternatives(kind):
        if isinstance(choice, inspect.ListType | inspect.VarTupleType) and isinstance(part, int):
            return choice.item_type
        if isinstance(choice, inspect.StructType) and part in (fields := field_types(choice.cls)):
            return fields[str(part)]
    return None


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [choice for inner in kind.types for choice in _alternatives(inner)]
    return [kind]


def _is_whole(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(_is_whole(choice) for choice in kind.types)
    return isinstance(kind, inspect.Metadata) and isinstance(kind.type, inspect.UnionType)


def _rule(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(extra_json_schema={"description": str(description)}):
            return description
        case inspect.Metadata():
            return _rule(kind.type)
        case inspect.UnionType():
            some = [choice for choice in kind.types if not isinstance(choice, inspect.NoneType)]
            return " or ".join(_rule(choice) for choice in some)
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in kind.values)
    return _PLAIN_RULES.get(type(kind), "null")
