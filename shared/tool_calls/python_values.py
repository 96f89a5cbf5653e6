"""Grammar rules of single values that are written in Python: with `True`, `False` and `None`.

llguidance writes the values of a JSON schema as JSON, wherever in a value a constant is. So a
schema is taken apart: each list, object and choice becomes a rule of its own, down to texts and
numbers. A schema that cannot be taken apart, such as one with `not`, is followed as JSON, and its
value may be a constant of Python as a whole. JSON's constants are allowed, too, as they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagewire.shared.grammar.lark_rules import LarkRules, json_text, other_name
from pagewire.shared.grammar.references import References
from pagewire.shared.grammar.schema_fit import is_idle, with_null, without_nulls
from pagewire.shared.tool_calls.argument_shapes import ArgumentShape, shape_of
from pagewire.shared.tool_calls.schema_constants import SchemaConstants, type_of, types_of
from pagewire.shared.tool_calls.value_schemas import ValueSchemas

_CONSTANTS: dict[bool | None, str] = {
    True: '"True" | "true"',
    False: '"False" | "false"',
    None: '"None" | "null"',
}
_SCALARS = {"string", "integer", "number"}
_OF_SCALARS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_SCALARS |= {"minLength", "maxLength", "pattern", "format"}
_OF_LISTS, _OF_OBJECTS = {"items", "minItems", "maxItems"}, {"properties", "required"}
_OF_OBJECTS |= {"additionalProperties"}
_BY_TYPE = {"type", *_OF_SCALARS, *_OF_LISTS, *_OF_OBJECTS}
# All keywords that say something about values; the others are annotations.
_SAYING = _BY_TYPE | {
    *("$id", "$ref", "$dynamicRef", "$recursiveRef", "const", "enum", "prefixItems", "contains"),
    *("additionalItems", "unevaluatedItems", "uniqueItems", "minContains", "maxContains"),
    *("patternProperties", "propertyNames", "unevaluatedProperties", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    *("anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
}
_MAX_ITEMS = 1024  # more cannot be counted item by item
_ANY, _KEY = "python_any", "PYTHON_KEY"
_TEXT = r'"([^"\\\x00-\x1f]|\\["\\bfnrt])*"'  # each text has one way to be written


class PythonValues:
    """Adds the rules of a function's values to a grammar.

    Args:
        prefix: prefix of the names of further rules.
        root: schema of the function's arguments, into which the values' schemas refer.
        rules: the grammar's rules.
        lenient: see `json_expression`.
    """

    def __init__(
        self, prefix: str, root: dict[str, Any], rules: LarkRules, lenient: bool = False
    ) -> None:
        self._prefix, self._rules, self._lenient = prefix, rules, lenient
        self._schemas = ValueSchemas(root, rules, lenient)
        self._references = References(root)
        self._constants = SchemaConstants(self._references)
        self._num_names, self._has_any = 0, False
        self._known: dict[int, tuple[Any, str]] = {}  # as in `ValueSchemas`
        self._referred: dict[str, str] = {}  # names of rules, by reference

    def add(self, name: str, schema: Any) -> str:
        """Add the rule of values that follow a schema; return its name, which may be another one.

        Args and errors as in `ValueSchemas.add`.
        """
        try:
            return self._add(name, schema)
        except RecursionError as exc:
            raise ValueError("it is nested too deeply") from exc

    def _add(self, name: str, schema: Any) -> str:
        if schema is True or schema == {}:
            return self._any()
        if id(schema) not in self._known:
            self._known[id(schema)] = schema, self._new(name, schema)
        return self._known[id(schema)][1]

    def _new(self, name: str, schema: Any) -> str:
        if not self._constants.anywhere(schema):
            return self._schemas.add(name, schema)
        keywords = _what_it_says(schema) if isinstance(schema, dict) else {}
        if not keywords:
            return self._any()
        expressions = self._parts(schema, keywords)
        if expressions is None:
            expressions = [self._schemas.add(self._next(), schema)]
            allows = self._constants.allows
            expressions += [text for each, text in _CONSTANTS.items() if allows(schema, each)]
        is_rule = len(expressions) == 1 and expressions[0].isidentifier()
        return expressions[0] if is_rule else self._rules.add_shared(name, " | ".join(expressions))

    def _next(self) -> str:
        self._num_names += 1
        return f"{self._prefix}{self._num_names}"

    def _parts(self, schema: Any, keywords: dict[str, Any]) -> list[str] | None:
        """Return expressions of the values that a schema allows; None if it has other keywords.

        Args:
            schema: the schema.
            keywords: what it says about values.
        """
        keys = keywords.keys()
        if keys == {"$ref"} and isinstance(keywords["$ref"], str):
            return [self._refer(keywords["$ref"])]
        if keys <= {"anyOf", "oneOf", "allOf"} and len(keys) == 1:
            return self._choice(schema, *keywords.items())
        if keys <= {"type", "const", "enum"} and keys != {"type"}:
            return self._listed(keywords)
        return self._by_type(keywords) if keys <= _BY_TYPE else None

    def _refer(self, reference: str) -> str:
        if reference not in self._referred:
            self._referred[reference] = name = self._next()
            try:
                self._rules[name] = self._add(self._next(), self._references.find(reference))
            except LookupError as exc:
                raise ValueError(exc.args[0]) from None
        return self._referred[reference]

    def _choice(self, schema: Any, choice: tuple[str, Any]) -> list[str] | None:
        kind, parts = choice
        if not isinstance(parts, list) or (kind == "allOf" and len(parts) > 1):
            return None
        expressions = [self._add(self._next(), part) for part in parts if part is not False]
        if kind == "oneOf" and not self._lenient:  # which llguidance refuses unless it is `anyOf`
            expressions.append(self._schemas.add(self._next(), schema))
        return list(dict.fromkeys(expressions)) or None

    def _listed(self, keywords: dict[str, Any]) -> list[str] | None:
        values = keywords.get("enum", [keywords.get("const")])
        kinds = types_of(keywords)
        if not isinstance(values, list) or kinds is None or len(keywords.keys() - {"type"}) > 1:
            return None
        values = [item for item in values if type_of(item) & kinds]
        constants = [each for each in _CONSTANTS if any(each is value for value in values)]
        if not constants:
            return None
        others = [item for item in values if not isinstance(item, bool | None)]
        expressions = [self._schemas.add(self._next(), {"enum": others})] if others else []
        return [*expressions, *(_CONSTANTS[constant] for constant in constants)]

    def _by_type(self, keywords: dict[str, Any]) -> list[str] | None:
        kinds = types_of(keywords)
        if not kinds:
            return None
        expressions = []
        if scalars := sorted(kinds & _SCALARS):
            rest = {key: value for key, value in keywords.items() if key in _OF_SCALARS}
            expressions.append(self._schemas.add(self._next(), {**rest, "type": scalars}))
        if "array" in kinds:
            if (items := self._list(keywords)) is None:
                return None
            expressions.append(items)
        if "object" in kinds:
            if (fields := self._object(keywords)) is None:
                return None
            expressions.append(fields)
        expressions += [_CONSTANTS[True], _CONSTANTS[False]] if "boolean" in kinds else []
        return [*expressions, _CONSTANTS[None]] if "null" in kinds else expressions

    def _list(self, keywords: dict[str, Any]) -> str | None:
        least, most = keywords.get("minItems", 0), keywords.get("maxItems", _MAX_ITEMS)
        items = keywords.get("items", {})
        if not (type(least) is type(most) is int and 0 <= least <= most <= _MAX_ITEMS):
            return None
        if not isinstance(items, dict | bool):
            return None
        if items is False or most == 0:
            return None if least else '"[]"'
        item = self._add(self._next(), items)
        last = most - 1 if "maxItems" in keywords else ""
        more = f'(", " {item}){{{max(least - 1, 0)},{last}}}' if most > 1 else ""
        some = f'"[" {item} {more} "]"'
        return some if least else f'"[]" | {some}'

    def _object(self, keywords: dict[str, Any]) -> str | None:
        try:
            shape = shape_of(keywords)
        except ValueError:  # it requires what it does not allow
            return None
        if not isinstance(keywords.get("properties", {}), dict):
            return None
        prefix, names = self._next(), list(shape.properties)
        first_other, more_other = self._others(prefix, shape)
        fields = [
            f"{json_text(f'{json_text(name)}: ')} {self._add(self._next(), schema)}"
            for name, schema in shape.properties.items()
        ]
        may_skip = [name not in shape.required for name in names]
        chain = add_chain(self._rules, prefix, fields, may_skip, first_other, more_other)
        return f'"{{" {chain} "}}"' if chain else '"{}"'

    def _others(self, prefix: str, shape: ArgumentShape) -> tuple[str, str]:
        """Add the rules of properties that are not listed; return as `add_chain` takes them."""
        if shape.others is False:
            return "", ""
        known = map(json_text, (*shape.properties, *sorted(shape.excluded)))
        pattern = other_name(_TEXT, ": ", known)
        key = self._rules.add_shared(f"{prefix}_KEY".upper(), pattern)
        field = f"{key} {self._add(self._next(), shape.others)}"
        return f'({field} (", " {field})*)?', f'(", " {field})*'

    def _any(self) -> str:
        """Return the rule of any value."""
        if not self._has_any and _ANY not in self._rules:
            key = self._rules.add_shared(_KEY, other_name(_TEXT, ": ", ()))
            scalar = self._schemas.add("python_scalar", {"type": ["string", "number"]})
            field, more = f"{key} {_ANY}", f'(", " {_ANY})*'
            lists = f'"[]" | "[" {_ANY} {more} "]"'
            objects = f'"{{}}" | "{{" {field} (", " {field})* "}}"'
            self._rules[_ANY] = " | ".join([scalar, *_CONSTANTS.values(), lists, objects])
        self._has_any = True
        return _ANY


def add_chain(
    rules: LarkRules,
    prefix: str,
    parts: Sequence[str],
    may_skip: Sequence[bool],
    first_other: str = "",
    more_other: str = "",
) -> str:
    """Add the rules of parts with commas between them; return the expression of them all.

    Each part has two rules: `first` (the parts from it on, if none came before) and `more` (the
    parts from it on, each after a comma).

    Args:
        rules: the grammar's rules.
        prefix: prefix of the rules' names.
        parts: expressions, in order.
        may_skip: which of the parts may be left out.
        first_other: expression of what may come after them all, if none of them comes ...
        more_other: ... and if one does.
    """
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        rules[f"{prefix}_p{index}"] = part
        first = (first_other or '""') if is_last else f"{prefix}_first{index + 1}"
        more = (more_other or '""') if is_last else f"{prefix}_more{index + 1}"
        rest = f"{prefix}_p{index} {more}".removesuffix(' ""')
        rules[f"{prefix}_first{index}"] = rest + (f" | {first}" if may_skip[index] else "")
        if index:
            rest = f'", " {rest}' + (f" | {more}" if may_skip[index] else "")
            rules[f"{prefix}_more{index}"] = rest
    return f"{prefix}_first0" if parts else first_other


def _what_it_says(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema says about values."""
    return {
        key: value
        for key, value in with_null(without_nulls(schema)).items()
        if not is_idle(key, value) and key in _SAYING
    }
