"""Follows the references (`$ref`) of a JSON schema within its own document."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import unquote

DEFINITIONS = ("$defs", "definitions")

# Keywords whose value has schemas: one or a list of them, or an object of them by name.
_SCHEMAS = (
    *("items", "prefixItems", "additionalItems", "contains", "additionalProperties", "not"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "if", "then", "else"),
    *("anyOf", "oneOf", "allOf"),
)
_MAX_STEPS = 64  # references that each lead to the next one
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
_HAVING = {*_SCHEMAS, *_BY_NAME}


class References:
    """The places of one document to which its references lead.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root

    def find(self, reference: str) -> Any:
        """Return what a reference leads to: a path (`#/$defs/a`), an anchor, or a part by its id.

        Raises:
            LookupError: it leads nowhere, or out of the document; the error says so.
        """
        base, _, fragment = reference.partition("#")
        target: Any = self._root
        if base and base != self._root.get("$id"):
            target = self._named(base, f"$ref {reference[:80]!r} leads out of the schema")
        if fragment and not fragment.startswith("/"):
            return self._named(f"#{unquote(fragment)}", _nowhere(reference))
        path = [
            part.replace("~1", "/").replace("~0", "~") for part in unquote(fragment).split("/")[1:]
        ]
        for name in path:
            is_index = isinstance(target, list) and name.isdecimal()
            try:
                target = target[int(name) if is_index else name]
            except (LookupError, TypeError, ValueError):
                raise LookupError(_nowhere(reference)) from None
        return target

    def _named(self, name: str, problem: str) -> Any:
        if name not in self._names:
            raise LookupError(f"{problem}; '#/$defs/a' leads to a part of it")
        return self._names[name]

    @cached_property
    def _names(self) -> dict[str, Any]:
        """The parts that have a name, by `$id`, and by `#` and `$anchor`."""
        return {
            prefix + text.removesuffix("#"): part
            for part in parts_of(self._root)
            for key, prefix in (("$id", ""), ("$anchor", "#"))
            if isinstance(text := part.get(key), str)
        }


def _nowhere(reference: str) -> str:
    return f"$ref {reference[:80]!r} leads nowhere in the schema"


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Return a schema and each schema in it that has keywords."""
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case list() as each:
                waiting += each
            case dict() as part if part:
                yield part
                if _HAVING.isdisjoint(part):
                    continue
                waiting += [part[key] for key in _SCHEMAS if key in part]
                for key in _BY_NAME:
                    inner = part.get(key)
                    waiting += inner.values() if isinstance(inner, dict) else ()


def check_references(schema: Any) -> None:
    """Check that each `$ref` of a schema leads to a part of it.

    Raises:
        ValueError: one leads nowhere, out of the schema, or only to itself.
    """
    references_of = (part.get("$ref") for part in parts_of(schema))
    wanted = dict.fromkeys(text for text in references_of if isinstance(text, str))
    references = References(schema)
    for reference in wanted:
        try:
            _check_end(reference, references)
        except LookupError as exc:
            raise ValueError(exc.args[0]) from None


def _check_end(reference: str, references: References) -> None:
    """Check that a reference leads to more than further references.

    Raises:
        LookupError: it leads nowhere, out of the document, or only to itself.
    """
    seen: set[str] = set()
    step: Any = reference
    while isinstance(step, str):
        if step in seen or len(seen) > _MAX_STEPS:
            raise LookupError(
                f"$ref {reference[:80]!r} leads only to itself, or its references never end"
            )
        seen.add(step)
        target = references.find(step)
        step = target.get("$ref") if isinstance(target, dict) else None
