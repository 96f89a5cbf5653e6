"""Random JSON schemas: nested, with references, enumerations, patterns, bounds and choices.

All are bounded: no answer that fits a schema is longer than a few hundred tokens.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ["name", "size", "kind", "id", "tags", "items", "value", "unit", "state", "note", "when"]
_PATTERNS = [
    r"^[a-z]{2,8}$",
    r"^[A-Z]{3}-[0-9]{4}$",
    r"^(red|green|blue)( (light|dark))?$",
    r"^[0-9]{4}-[01][0-9]-[0-3][0-9]$",
    r"^\+?[0-9]{6,9}$",
    r"^[a-f0-9]{8}$",
    r"^v[0-9]\.[0-9]{1,2}(-rc[1-9])?$",
]
_FORMATS = ["date", "uuid", "ipv4"]  # others, such as email, have no bound


class SchemaMaker:
    """Makes schemas, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._defs: Schema = {}

    def make(self) -> Schema:
        """Return the next schema."""
        self._defs = {}
        root = self._object(2)
        if self._random.random() < 0.4:
            self._defs["part"] = self._object(0)
            root["properties"]["part"] = {"$ref": "#/$defs/part"}
            root["required"] = [*root["required"], "part"]
            if self._random.random() < 0.5:
                two = {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
                root["properties"]["parts"] = two
        if self._random.random() < 0.15:
            self._defs["node"] = {
                "type": "object",
                "properties": {"leaf": self._number(), "left": {"$ref": "#/$defs/end"}},
                "required": ["leaf"],
                "additionalProperties": False,
            }
            self._defs["end"] = {"enum": [None, "end"]}
            root["properties"]["tree"] = {"$ref": "#/$defs/node"}
        return {**root, "$defs": self._defs} if self._defs else root

    def _any(self, depth: int) -> Schema:
        simple = [self._string, self._number, self._enum, self._fixed, self._nullable]
        nested = [lambda: self._object(depth - 1), lambda: self._array(depth - 1), self._choice]
        makers = simple + (nested * 2 if depth > 0 else [])
        return self._random.choice(makers)()

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_WORDS, self._random.randint(1, 4))
        required = [name for name in names if self._random.random() < 0.8]
        return {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        if self._random.random() < 0.2:
            items = [self._any(0) for _ in range(self._random.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        return {
            "type": "array",
            "items": self._any(min(depth, 0)),
            "minItems": least,
            "maxItems": least + self._random.randint(1, 2),
        }

    def _choice(self) -> Schema:
        kinds = self._random.sample([self._string, self._number, self._fixed, self._enum], 2)
        return {"anyOf": [*(make() for make in kinds), self._object(0)]}

    def _string(self) -> Schema:
        match self._random.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
            case 1:
                return {"type": "string", "format": self._random.choice(_FORMATS)}
            case _:
                least = self._random.randint(0, 4)
                most = least + self._random.randint(1, 10)
                return {"type": "string", "minLength": least, "maxLength": most}

    def _number(self) -> Schema:
        least = self._random.randint(-500, 500)
        most = least + self._random.randint(1, 2000)
        match self._random.randrange(3):
            case 0:
                return {"type": "integer", "minimum": least, "maximum": most}
            case 1:
                return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": most + 2}
            case _:
                # Not type number: it may have digits without end.
                return {"type": "integer", "minimum": 0, "maximum": most + 600, "multipleOf": 5}

    def _enum(self) -> Schema:
        values: list[Any] = [*self._random.sample(_WORDS, 3), None, True, 7]
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _fixed(self) -> Schema:
        return {"const": self._random.choice(["fixed", 3, False, None])}

    def _nullable(self) -> Schema:
        return {"type": ["boolean", "null"]}
