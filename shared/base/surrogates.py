"""Finds halves of surrogate pairs in JSON, which msgspec takes for the end of its input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile(r"[\ud800-\udfff]")
_Path = tuple[str | int, ...]


def lone_surrogate(encoded: str | bytes | bytearray) -> tuple[_Path, str] | None:
    r"""Return where JSON has an escape such as \ud800 without its other half, and what is wrong.

    Args:
        encoded: what msgspec cannot decode; it may have another mistake.

    Returns:
        names of fields and indexes in lists, and the reason; None if there is no such half, or if
        it is nested too deeply to look for one.
    """
    text = encoded if isinstance(encoded, str) else encoded.decode(errors="replace")
    if _ESCAPED.search(text) is None:
        return None
    try:
        surrogate = next(_halves(json.loads(text, object_pairs_hook=tuple), ()), None)
    except (ValueError, RecursionError):
        return None
    if surrogate is None:
        return None
    path, half = surrogate
    escape = rf"\u{ord(half):04x}"
    return path, f"{escape} is half of a surrogate pair: send both halves or the character itself"


def _halves(value: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    """Yield the halves in a value, an object of which is a tuple of pairs."""
    match value:
        case str():
            yield from ((path, half) for half in _HALF.findall(value))
        case list():
            for index, each in enumerate(value):
                yield from _halves(each, (*path, index))
        case tuple():
            for name, each in value:
                yield from _halves(name, path)
                yield from _halves(each, (*path, name))
