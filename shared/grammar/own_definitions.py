"""Moves the definitions of a schema's parts to the whole, so that all references lead from there.

`#/$defs/a` is a path from the whole schema. Libraries write it as well in the schema of a property
that has `$defs` of its own, as it was made alone. So where the whole has no such place, the nearest
part around the reference counts that has it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from pagewire.shared.grammar.references import DEFINITIONS, parts_of
from pagewire.shared.grammar.schema_fit import changed_in

_UNSAFE = re.compile("[^A-Za-z0-9_.-]")  # characters that a path may have to escape
_OWN = frozenset(DEFINITIONS)
_MAX_DEPTH = 64  # of schemas in one another, lists counted; Python's stack is never full then

# The new names of a part's definitions, by keyword and old name.
_Names = dict[tuple[str, str], str]


def with_definitions_moved(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose parts have no definitions; the schema itself if that is one already.

    Raises:
        ValueError: the schema is nested too deeply.
    """
    if all(_OWN.isdisjoint(part) for part in parts_of(schema) if part is not schema):
        return schema
    return _Mover(schema).moved()


class _Mover:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._own = {key: root[key] for key in DEFINITIONS if isinstance(root.get(key), dict)}
        self._definitions: dict[str, Any] = {}  # the definitions that were moved
        self._taken = set(self._own.get("$defs", ()))
        self._numbers: dict[str, Iterator[int]] = {}
        # By the ids of the parts, which the whole keeps.
        self._names: dict[int, _Names] = {}

    def moved(self) -> dict[str, Any]:
        """Return the schema with all definitions in its own `$defs`."""
        whole: dict[str, Any] = self._part(self._root, ())
        own = whole["$defs"] if "$defs" in self._own else {}
        return {**whole, "$defs": {**own, **self._definitions}}

    def _part(self, schema: Any, around: tuple[_Names, ...], depth: int = 0) -> Any:
        """Return a part; `around` has the definitions of those around it, the nearest first."""
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(schema, list):
            return [self._part(part, around, depth + 1) for part in schema]
        if not isinstance(schema, dict) or (schema is not self._root and "$id" in schema):
            return schema
        if schema is not self._root and (names := self._names_of(schema)):
            around = (names, *around)
            for (key, name), moved in names.items():
                self._definitions[moved] = self._part(schema[key][name], around, depth + 1)
            schema = {key: part for key, part in schema.items() if key not in _OWN}
        rest = {
            key: changed_in(key, part, lambda inner: self._part(inner, around, depth + 1))
            for key, part in schema.items()
        }
        if isinstance(reference := schema.get("$ref"), str):
            rest["$ref"] = self._moved_reference(reference, around)
        return rest

    def _names_of(self, part: dict[str, Any]) -> _Names:
        """Return the new names of a part's definitions."""
        if id(part) not in self._names:
            self._names[id(part)] = {
                (key, name): self._new_name(name)
                for key in DEFINITIONS
                if isinstance(part.get(key), dict)
                for name in part[key]
            }
        return self._names[id(part)]

    def _new_name(self, name: str) -> str:
        plain = _UNSAFE.sub("_", name)
        numbers = self._numbers.setdefault(plain, itertools.count(2))
        chosen = plain
        while chosen in self._taken:
            chosen = f"{plain}_{next(numbers)}"
        self._taken.add(chosen)
        return chosen

    def _moved_reference(self, reference: str, around: tuple[_Names, ...]) -> str:
        if not reference.startswith("#/"):
            return reference
        path = reference.split("/")[1:]
        plain = [unquote(each).replace("~1", "/").replace("~0", "~") for each in path]
        if len(path) > 1 and plain[0] in _OWN and plain[1] not in self._own.get(plain[0], ()):
            for names in around:
                if (plain[0], plain[1]) in names:
                    return "/".join(("#/$defs", names[plain[0], plain[1]], *path[2:]))
        part: Any = self._root
        for at, step in enumerate(plain):  # the path may lead through a part whose definitions move
            if part is not self._root and isinstance(part, dict) and at + 1 < len(plain):
                moved = self._names_of(part).get((step, plain[at + 1])) if step in _OWN else None
                if moved is not None:
                    return "/".join(("#/$defs", moved, *path[at + 2 :]))
            try:
                part = part[int(step) if isinstance(part, list) else step]
            except (LookupError, TypeError, ValueError):
                break
        return reference
