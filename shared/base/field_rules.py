"""Rules for the fields of a struct, as texts and as checks, from their declared types.

A type's bounds and its rule in words are declared once:

    Annotated[int, Meta(ge=1, le=16, description="an integer from 1 to 16")]

msgspec checks what arrives as JSON, `check_fields` what is made in Python.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence, Sized
from functools import cache
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

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
        for name, kind in field_types(type(values)).items():
            _check_field(name, getattr(values, name), kind)


def _check_field(name: str, value: Any, kind: inspect.Type) -> None:
    if _fits(value, kind):
        return
    path, item = name, _wrong_item(value, kind)
    depth, rule = rule_at(kind, item)
    for index in item[:depth]:
        path, value = f"{path}[{index}]", value[index]
    raise InvalidRequestError(f"{path} must be {rule}, not {reprlib.repr(value)}", name)


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
    for each in _alternatives(kind):
        if isinstance(each, inspect.ListType | inspect.VarTupleType) and isinstance(part, int):
            return each.item_type
        if isinstance(each, inspect.StructType) and part in (fields := field_types(each.cls)):
            return fields[str(part)]
    return None


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [each for inner in kind.types for each in _alternatives(inner)]
    return [kind]


def _is_whole(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(_is_whole(each) for each in kind.types)
    return isinstance(kind, inspect.Metadata) and isinstance(kind.type, inspect.UnionType)


def _rule(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(extra_json_schema={"description": str(description)}):
            return description
        case inspect.Metadata():
            return _rule(kind.type)
        case inspect.UnionType():
            some = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            return " or ".join(_rule(each) for each in some)
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in kind.values)
    return _PLAIN_RULES.get(type(kind), "null")


def _fits(value: Any, kind: inspect.Type) -> bool:
    """Whether a value has a type; the bounds of a NaN are never kept."""
    match kind:
        case inspect.Metadata():
            return _fits(value, kind.type)
        case inspect.UnionType():
            return any(_fits(value, each) for each in kind.types)
        case inspect.NoneType():
            return value is None
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool) and _in_range(value, kind)
        case inspect.FloatType():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and _in_range(value, kind)
        case inspect.StrType():
            return isinstance(value, str) and _has_length(value, kind)
        case inspect.DictType():
            return (
                isinstance(value, dict)
                and _has_length(value, kind)
                and all(_fits(key, kind.key_type) for key in value)
                and all(_fits(item, kind.value_type) for item in value.values())
            )
        case inspect.ListType() | inspect.VarTupleType():
            is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            return (
                is_list
                and _has_length(value, kind)
                and all(_fits(item, kind.item_type) for item in value)
            )
        case inspect.StructType(cls=cls):
            return isinstance(value, cls | dict)  # its own fields are checked where it is read
    return False


def _in_range(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


_Sized = inspect.DictType | inspect.ListType | inspect.StrType | inspect.VarTupleType


def _has_length(value: Sized, kind: _Sized) -> bool:
    low, high = kind.min_length or 0, kind.max_length
    return low <= len(value) and (high is None or len(value) <= high)


def _wrong_item(value: Any, kind: inspect.Type) -> list[int]:
    """Return the index of the first wrong item of a list that is otherwise right, if there is one.

    A list of a wrong length is wrong itself.
    """
    for each in _alternatives(kind):
        if isinstance(each, inspect.ListType | inspect.VarTupleType):
            is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            if is_list and _has_length(value, each):
                wrong = (i for i, item in enumerate(value) if not _fits(item, each.item_type))
                return list(islice(wrong, 1))
    return []
