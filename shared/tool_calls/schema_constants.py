"""Finds where the values of a JSON schema may be `true`, `false` or `null`."""

from __future__ import annotations

from typing import Any

from pagewire.shared.grammar.references import References
from pagewire.shared.grammar.schema_fit import with_null, without_nulls

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))

_CHOICES = ("allOf", "anyOf", "oneOf")
_LISTS = (
    *_CHOICES,
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "then", "else"),
    *("additionalProperties", "unevaluatedProperties"),
)
_BY_NAME = ("properties", "patternProperties", "dependentSchemas")


class SchemaConstants:
    """Finds the constants that schemas allow; each schema is read once.

    Args:
        references: into the whole schema.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        # By the ids of the schemas, which are kept.
        self._anywhere: dict[int, tuple[Any, bool]] = {}
        self._follows: dict[tuple[int, bool | None], tuple[Any, bool]] = {}

    def anywhere(self, schema: Any) -> bool:
        """Whether a value that follows a schema may have a constant in it."""
        if not isinstance(schema, dict) or not schema:
            return schema is not False
        if id(schema) in self._anywhere:
            return self._anywhere[id(schema)][1]
        new, waiting, containing = dict[int, Any](), [schema], list[int]()
        above: dict[int, list[int]] = {}  # the schemas that have one in them
        while waiting:
            each = waiting.pop()
            if id(each) in self._anywhere or id(each) in new:
                continue
            new[id(each)] = each
            inner = self._inner(each)
            is_one = _may_be_constant(each) or any(part is True or part == {} for part in inner)
            for part in inner:
                if isinstance(part, dict) and part:
                    waiting.append(part)
                    above.setdefault(id(part), []).append(id(each))
                    is_one = is_one or self._anywhere.get(id(part), _NO)[1]
            if is_one:
                containing.append(id(each))
        with_constants = set[int]()
        while containing:
            if (key := containing.pop()) not in with_constants:
                with_constants.add(key)
                containing += above.get(key, ())
        self._anywhere |= {key: (inner, key in with_constants) for key, inner in new.items()}
        return self._anywhere[id(schema)][1]

    def _inner(self, schema: dict[str, Any]) -> list[Any]:
        """Return the schemas of a value, and of what is in it."""
        schemas: list[Any] = []
        for key in _LISTS:
            parts = schema.get(key)
            schemas += parts if isinstance(parts, list) else [parts]
        for key in _BY_NAME:
            parts = schema.get(key)
            schemas += parts.values() if isinstance(parts, dict) else ()
        if isinstance(reference := schema.get("$ref"), str):
            schemas.append(self._target_of(reference))
        return schemas

    def _target_of(self, reference: str) -> Any:
        try:
            return self._references.find(reference)
        except LookupError:
            return False

    def allows(self, schema: Any, value: bool | None) -> bool:
        """Whether a constant follows a schema."""
        if not isinstance(schema, dict):
            return schema is not False
        key = id(schema), value
        if key not in self._follows:
            self._follows[key] = schema, False  # an alternative that contains itself adds nothing
            self._follows[key] = schema, self._is_allowed(with_null(without_nulls(schema)), value)
        return self._follows[key][1]

    def _is_allowed(self, schema: dict[str, Any], value: bool | None) -> bool:
        kinds, listed = types_of(schema), schema.get("enum")
        if kinds is None or not type_of(value) & kinds:
            return False
        if isinstance(listed, list) and not any(item is value for item in listed):
            return False
        if "const" in schema and schema["const"] is not value:
            return False
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self.allows(self._target_of(reference), value):
            return False
        follows = {
            key: [self.allows(alternative, value) for alternative in schema[key]]
            for key in _CHOICES
            if isinstance(schema.get(key), list)
        }
        if not all(follows.get("allOf", ())) or not any(follows.get("anyOf", (True,))):
            return False
        if sum(follows.get("oneOf", (True,))) != 1 or self.allows(schema.get("not", False), value):
            return False
        branch = "then" if self.allows(schema.get("if", True), value) else "else"
        return "if" not in schema or self.allows(schema.get(branch, True), value)


_NO: tuple[Any, bool] = (None, False)


def types_of(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema names, all if none; None if it has others than JSON's."""
    kinds = schema.get("type", [*TYPES])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    is_known = all(isinstance(kind, str) and kind in TYPES for kind in kinds)
    return frozenset(kinds) if is_known else None


def type_of(value: Any) -> frozenset[str]:
    """Return the types that a value has: a whole number has two."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case dict():
            return frozenset({"object"})
        case float() if not value.is_integer():
            return frozenset({"number"})
    return frozenset({"integer", "number"})


def _may_be_constant(schema: dict[str, Any]) -> bool:
    """Whether a value may have a constant in it, the schemas within a schema aside."""
    schema = without_nulls(schema)
    if schema.get("nullable") is True:
        return True
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list):
        return any(isinstance(value, bool | None) for value in listed)
    kinds, is_chosen = types_of(schema), not schema.keys().isdisjoint((*_CHOICES, "$ref"))
    if kinds is None or (is_chosen and "type" not in schema):
        return False
    is_open = not is_chosen and "additionalProperties" not in schema
    any_item = not is_chosen and schema.keys().isdisjoint(("items", "prefixItems"))
    return (
        bool(kinds & {"boolean", "null"})
        or ("object" in kinds and is_open)
        or ("array" in kinds and any_item)
    )
