"""The JSON schemas of a function's single arguments, for formats that write them one by one.

Each becomes a rule with a JSON schema of its own, and llguidance has no references from one JSON
schema into another. So a rule has the definitions that its schema needs and nothing else of the
function's schema, and equal schemas share one rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from pagewire.shared.grammar.lark_rules import LarkRules, check_size
from pagewire.shared.grammar.references import DEFINITIONS, References
from pagewire.shared.grammar.schema_fit import fitted

# White space as in Python's `json`, as models are trained; fixed, so that it cannot be endless.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LENIENT = {"lenient": True, "coerce_one_of": True}


class _Part(NamedTuple):
    """A schema as JSON, and the references in it."""

    text: str
    references: list[str]


class ValueSchemas:
    """Adds the rules of a function's values to a grammar.

    Args:
        root: schema of the function's arguments, into which the values' schemas refer.
        rules: the grammar's rules.
        lenient: see `json_expression`.
    """

    def __init__(self, root: dict[str, Any], rules: LarkRules, lenient: bool = False) -> None:
        self._root, self._rules, self._lenient = root, rules, lenient
        self._references = References(root)
        self._keys: dict[str, str] = {}  # keys of definitions, by the references to them
        self._definitions: dict[str, _Part] = {}  # by the references to them
        self._names: dict[str, str] = {}  # names of rules, by their schemas without definitions
        # Schemas and the names of their rules, by the schemas' ids.
        self._known: dict[int, tuple[Any, str]] = {}

    def add(self, name: str, schema: Any) -> str:
        """Add the rule of values that follow a schema; return its name, which may be another one.

        Args:
            name: name of the rule, if there is none of such values yet.
            schema: a part of the function's schema; anything but an object allows any value.

        Raises:
            ValueError: the schema has numbers that no grammar can express, is nested too deeply,
                has a text that UTF-8 cannot encode, or makes the grammar too large.
        """
        if id(schema) not in self._known:
            self._known[id(schema)] = schema, self._add(name, schema)
        return self._known[id(schema)][1]

    def _add(self, name: str, schema: Any) -> str:
        schema = schema if isinstance(schema, dict) else {}
        try:
            return self._add_part(name, schema)
        except LookupError:  # references of another kind: llguidance finds what they point to
            whole = {**self._all_definitions, **fitted(schema, self._lenient)}
            text = msgspec.json.encode(whole).decode()
            return self._rules.add_shared(name, json_expression(text, {}, self._lenient))

    def _add_part(self, name: str, schema: dict[str, Any]) -> str:
        """Add the rule of a schema and the definitions that it needs; errors as in `_part`."""
        part = self._part(schema)
        if part.text not in self._names:
            rule = json_expression(part.text, self._needed(part), self._lenient)
            self._names[part.text] = self._rules.add_shared(name, rule)
        return self._names[part.text]

    def _part(self, schema: Any) -> _Part:
        """Return a schema in which references point to definitions by their keys.

        Raises:
            LookupError: a reference may be of another kind than the path of a schema.
        """
        references: list[str] = []

        def renamed(each: dict[str, Any]) -> dict[str, Any]:
            if "$id" in each:
                raise LookupError("a schema with a base of its own")
            if isinstance(reference := each.get("$ref"), str):
                references.append(reference)
                key = self._keys.setdefault(reference, str(len(self._keys)))
                each["$ref"] = f"#/$defs/{key}"
            return {key: value for key, value in each.items() if key not in DEFINITIONS}

        schema = fitted(schema, self._lenient, renamed)
        return _Part(msgspec.json.encode(schema).decode(), references)

    def _needed(self, part: _Part) -> dict[str, str]:
        """Return the definitions that a schema needs, as JSON, by their keys."""
        needed: dict[str, str] = {}
        waiting, num_chars = list(part.references), 0
        while waiting:
            reference = waiting.pop()
            key = self._keys[reference]
            if key in needed:
                continue
            if reference not in self._definitions:
                self._definitions[reference] = self._part(self._references.find(reference))
            needed[key], references = self._definitions[reference]
            waiting += references
            num_chars += len(needed[key])
            check_size(num_chars)
        return needed

    @cached_property
    def _all_definitions(self) -> dict[str, Any]:
        given = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        schema = fitted(given, self._lenient)
        return {key: msgspec.Raw(msgspec.json.encode(part)) for key, part in schema.items()}


def json_expression(schema: str, definitions: Mapping[str, str], lenient: bool) -> str:
    """Return the expression of a value that follows a schema.

    Args:
        schema: JSON of the schema, which `fitted` has returned.
        definitions: JSON of the definitions in it, by their keys.
        lenient: keywords and formats that no grammar can express are ignored, and `oneOf` is
            `anyOf`.
    """
    options = {**_JSON_STYLE, **_LENIENT} if lenient else _JSON_STYLE
    others: dict[str, Any] = {"x-guidance": options}
    if definitions:
        others["$defs"] = {
            key: msgspec.Raw(definition.encode()) for key, definition in definitions.items()
        }
    end = msgspec.json.encode(others).decode()
    return f"%json {schema[:-1]}{'' if schema == '{}' else ','}{end[1:]}"
