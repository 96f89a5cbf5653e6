"""Schemas that are small to send and meant to cost much to read, in any size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]


def _object(properties: Schema, **others: Any) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False, **others}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _words(size: int) -> list[str]:
    """Return different texts that take about this many bytes as JSON."""
    return [f"word {number:06}" for number in range(size // 15)]


def described_definition(size: int) -> Schema:
    """Many properties that refer to one definition, which is mostly a description."""
    properties = {f"p{number}": _ref("D") for number in range(size // 3 // 31)}
    return _object(
        properties, **{"$defs": {"D": {"type": "integer", "description": "d" * (size * 2 // 3)}}}
    )


def large_definition(size: int) -> Schema:
    """Many properties that refer to one definition, all of which the grammar needs."""
    properties = {f"p{number}": _ref("D") for number in range(size // 2 // 31)}
    return _object(properties, **{"$defs": {"D": {"enum": _words(size // 2)}}})


def differing_uses(size: int) -> Schema:
    """Many properties that each use one large definition in a way of their own."""
    properties = {
        f"p{number}": {"type": "array", "items": _ref("D"), "maxItems": number}
        for number in range(size // 2 // 72)
    }
    return _object(properties, **{"$defs": {"D": {"enum": _words(size // 2)}}})


def web_of_definitions(size: int) -> Schema:
    """Many definitions, each of which refers to many others."""
    count = max(2, int((size / 34) ** 0.5))
    names = [f"D{number}" for number in range(count)]
    each = _object({name: _ref(name) for name in names})
    return _object({name: _ref(name) for name in names}, **{"$defs": dict.fromkeys(names, each)})


def chain_of_references(size: int) -> Schema:
    """Definitions that each refer to the next one, and a property for each."""
    count = size // 80
    definitions = {
        f"D{number}": _object({"next": _ref(f"D{number + 1}")}) for number in range(count // 2)
    } | {f"D{count // 2}": {"type": "null"}}
    return _object({name: _ref(name) for name in definitions}, **{"$defs": definitions})


def plain_chain(size: int) -> Schema:
    """Definitions that are nothing but a reference to the next one."""
    count = size // 66
    definitions = {f"D{number}": _ref(f"D{number + 1}") for number in range(count)}
    definitions[f"D{count}"] = {"type": "null"}
    return _object({name: _ref(name) for name in definitions}, **{"$defs": definitions})


def fan_to_itself(size: int) -> Schema:
    """A definition with many alternatives, each the definition itself."""
    fan = {"anyOf": [_ref("D")] * (size // 25)}
    return _object({"p": _ref("D")}, **{"$defs": {"D": fan}})


def fans(size: int) -> Schema:
    """Definitions with many alternatives, each one of the other definitions."""
    count = max(2, int((size / 28) ** 0.5))
    names = [f"D{number}" for number in range(count)]
    fan = {"anyOf": [_ref(name) for name in names]}
    return _object({name: _ref(name) for name in names}, **{"$defs": dict.fromkeys(names, fan)})


def deep(size: int) -> Schema:
    """Many small values within objects that are nested deeply."""
    inner: Any = {"enum": [1] * (size // 3)}
    for _ in range(90):
        inner = {"items": inner}
    return _object({"p": inner})


def deep_default(size: int) -> Schema:
    """Many small values within lists that are nested deeply, in an annotation."""
    inner: Any = [1] * (size // 3)
    for _ in range(300):
        inner = [inner]
    return _object({"p": {"type": "integer", "default": inner}})


def nested_references(size: int) -> Schema:
    """Objects within objects, and at the innermost a reference to each of them."""
    depth, path, refs = 60, "#", []
    for _ in range(depth):
        path += "/properties/p"
        refs.append({"$ref": path})
    inner = _object({f"q{i}": ref for i, ref in enumerate(refs)}) | {"enum": _words(size - 25_000)}
    for _ in range(depth):
        inner = _object({"p": inner})
    return inner


def long_enum(size: int) -> Schema:
    """One property with many values."""
    return _object({"p": {"enum": _words(size)}})


def long_enums(size: int) -> Schema:
    """A hundred properties with many values, texts and others."""
    return _object({f"p{i}": {"enum": [*_words(size // 100), i]} for i in range(100)})


def many_properties(size: int) -> Schema:
    """Many properties of different kinds, all optional."""
    return _object({f"p{i}": {"type": "integer", "minimum": i} for i in range(size // 44)})


def many_texts(size: int) -> Schema:
    """Many text properties with patterns."""
    return _object({f"p{i}": {"type": "string", "pattern": f"^a{i}$"} for i in range(size // 46)})


def long_pattern(size: int) -> Schema:
    """One property with a long pattern."""
    return _object({"p": {"type": "string", "pattern": "[^a]|" * (size // 5) + "b"}})


def open_classes(size: int) -> Schema:
    """One property whose pattern has classes that do not end."""
    return _object({"p": {"type": "string", "pattern": "[a" * (size // 2)}})


def long_names(size: int) -> Schema:
    """Few properties with long names."""
    return _object({f"{'n' * (size // 8)}{i}": {"type": "integer"} for i in range(8)})


def required_others(size: int) -> Schema:
    """Required names that only a large schema of all others describes."""
    names = [f"p{number}" for number in range(size // 2 // 10)]
    others = _object({word: {} for word in _words(size // 2)})
    return _object({}, required=names, additionalProperties=others)


def bounded_references(size: int) -> Schema:
    """Properties that each refer to one large definition, with words of their own."""
    properties = {
        f"p{number}": {**_ref("D"), "minLength": number % 9, "title": str(number)}
        for number in range(size // 2 // 60)
    }
    return _object(properties, **{"$defs": {"D": {"enum": _words(size // 2)}}})


def nullable_references(size: int) -> Schema:
    """Properties that each are one large definition or null, in a way of their own."""
    properties = {
        f"p{number}": {"anyOf": [_ref("D"), {"type": "null"}], "title": str(number)}
        for number in range(size // 2 // 70)
    }
    return _object(properties, **{"$defs": {"D": {"enum": [*_words(size // 2), True]}}})


def many_required(size: int) -> Schema:
    """A long list of required names."""
    return _object({"p": {"type": "integer"}}, required=_words(size))


def small_objects(size: int) -> Schema:
    """As many empty schemas as fit."""
    return _object({"p": {"anyOf": [{}] * (size // 3)}})


def small_lists(size: int) -> Schema:
    """As many empty lists as fit."""
    return _object({"p": {"enum": [[]] * (size // 3)}})


def escapes(size: int) -> Schema:
    """Text that takes more space once it is escaped, or beside another character."""
    return _object({"p": {"const": "\x7f\u2028'\"\\<|end|>" * (size // 20) + "\N{GRINNING FACE}"}})


def annotated(size: int) -> Schema:
    """Values that no grammar needs."""
    values = [{"a": 1}] * (size // 20)
    return _object({"p": {"type": "integer", "default": values, "examples": values}})


SCHEMAS: dict[str, Callable[[int], Schema]] = {
    make.__name__: make
    for make in (
        described_definition, large_definition, differing_uses, web_of_definitions,
        chain_of_references, plain_chain, fan_to_itself, fans, deep, deep_default,
        nested_references, long_enum, long_enums, many_properties, many_texts, long_pattern,
        open_classes, long_names, many_required, required_others, bounded_references,
        nullable_references, small_objects, small_lists, escapes, annotated,
    )
}  # fmt: skip


def tools(kind: str, size: int, count: int = 1, strict: bool | None = None) -> list[Schema]:
    """Return tools that take about this many bytes together."""
    schema = SCHEMAS[kind](size // count)
    names = [f"f{number}" for number in range(count)]
    functions = [{"name": name, "parameters": schema, "strict": strict} for name in names]
    return [{"type": "function", "function": function} for function in functions]


def chat_body(**fields: Any) -> bytes:
    """Return a chat's body."""
    messages = [{"role": "user", "content": "Hi"}]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()
