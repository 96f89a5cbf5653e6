"""Reads from a function's schema which arguments a call may have, one by one.

References and `allOf` at the root are followed. Other keywords that apply to all arguments at once,
such as `anyOf`, have no grammar in these formats: they are refused, or ignored if that is allowed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from pagewire.shared.grammar.references import References
from pagewire.shared.grammar.schema_fit import without_nulls

_MAX_PARTS = 64  # schemas that the root refers to or has in `allOf`, and so on
_NOT_FOLLOWED = (
    *("anyOf", "oneOf", "not", "if", "then", "else", "enum", "const", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
_IDLE: dict[str, tuple[Any, ...]] = {
    "minProperties": (0,),
    "patternProperties": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
}


class ArgumentShape(NamedTuple):
    """The arguments of a call.

    Attributes:
        properties: schemas of arguments by name, in the schema's order.
        required: names of those that a call must have.
        others: schema of any others; False if there are none.
        excluded: names that no argument may have.
    """

    properties: dict[str, Any]
    required: set[str]
    others: Any
    excluded: frozenset[str] = frozenset()

    def schema_of(self, name: str) -> Any:
        """Return the schema of an argument; False if it is not allowed."""
        return self.properties.get(name, self.others)


def shape_of(schema: dict[str, Any], lenient: bool = False) -> ArgumentShape:
    """Return the arguments that a function's schema allows.

    Args:
        schema: the whole schema.
        lenient: keywords that cannot be followed are ignored.

    Raises:
        ValueError: there are such keywords; the error names them. Or a required name is not
            allowed, or the root refers to too many schemas.
    """
    shape = _Shapes(References(schema), lenient).of(schema)
    properties = {name: each for name, each in shape.properties.items() if each is not False}
    for name in sorted(shape.required - properties.keys()):
        if shape.schema_of(name) is not False:
            properties[name] = shape.others
        elif not lenient:
            raise ValueError(f"its schema requires {name[:80]!r}, which it does not allow")
    return shape._replace(
        properties=properties,
        required=shape.required & properties.keys(),
        excluded=frozenset(shape.properties) - properties.keys(),
    )


_ANY = ArgumentShape({}, set(), True)


class _Shapes:
    def __init__(self, references: References, lenient: bool) -> None:
        self._references, self._lenient = references, lenient
        self._num_parts = 0
        self._seen: set[int] = set()  # ids of parts, all of which the document keeps

    def of(self, schema: Any) -> ArgumentShape:
        if not isinstance(schema, dict) or id(schema) in self._seen:  # the same again adds nothing
            return _ANY if schema is not False else ArgumentShape({}, set(), False)
        self._seen.add(id(schema))
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ValueError(f"its root refers to more than {_MAX_PARTS} schemas")
        schema = without_nulls(schema)
        self._check(schema)
        properties, required = schema.get("properties"), schema.get("required")
        shape = ArgumentShape(
            dict(properties) if isinstance(properties, dict) else {},
            {name for name in required if isinstance(name, str)}
            if isinstance(required, list)
            else set(),
            schema.get("additionalProperties", True),
        )
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            shape = _both(shape, self.of(part))
        if isinstance(reference := schema.get("$ref"), str):
            shape = _both(shape, self.of(self._find(reference)))
        return shape

    def _check(self, schema: dict[str, Any]) -> None:
        wrong = [
            key for key in _NOT_FOLLOWED if key in schema and schema[key] not in _IDLE.get(key, ())
        ]
        if wrong and not self._lenient:
            raise ValueError(
                "grammars of this format of calls cannot express these keywords of its schema: "
                + ", ".join(wrong)
            )

    def _find(self, reference: str) -> Any:
        try:
            return self._references.find(reference)
        except LookupError as exc:
            if self._lenient:
                return True
            raise ValueError(exc.args[0]) from None


def _both(one: ArgumentShape, other: ArgumentShape) -> ArgumentShape:
    """Return the arguments that both allow."""
    if _ANY in (one, other):
        return other if one == _ANY else one
    properties: dict[str, Any] = {}
    known: dict[tuple[bytes | int, bytes | int], Any] = {}
    for name in dict.fromkeys((*one.properties, *other.properties)):
        schemas = one.schema_of(name), other.schema_of(name)
        if schemas[0] is schemas[1]:
            properties[name] = schemas[0]
            continue
        key = _key(schemas[0], one.others), _key(schemas[1], other.others)
        if key not in known:
            known[key] = _all_of(*schemas)
        properties[name] = known[key]
    return ArgumentShape(
        properties,
        one.required | other.required,
        _all_of(one.others, other.others),
    )


def _key(schema: Any, others: Any) -> bytes | int:
    """Return what equal schemas have in common; that of all others may be large and come often."""
    return id(others) if schema is others else msgspec.json.encode(schema)


def _all_of(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one in (True, {}) or one == other:
        return other
    return one if other in (True, {}) else {"allOf": [one, other]}
