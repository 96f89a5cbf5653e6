"""Writes results as lines of JSON, and as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any


def emit(what: str, **fields: Any) -> None:
    """Print one result; floats have four significant digits, or are whole from 1000 on."""
    rounded = {name: _rounded(value) for name, value in fields.items()}
    print("RESULT " + json.dumps({"what": what} | rounded), flush=True)


def emit_all(what: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print each row as soon as it is there, as a result, and then a table of them all."""
    shown = []
    for row in rows:
        emit(**{"what": what, **row})
        shown.append(row)
    print(markdown(shown))


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median of values by a name, with the lowest and the highest."""
    return {name: median(values), "low": min(values), "high": max(values)}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of rows; floats have three or four significant digits.

    Its columns are all of the rows' fields but `what`, and those that have parts.
    """
    columns = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if name != "what" and not isinstance(value, (list, dict))
    )
    head = [
        f"| {' | '.join(name.replace('_', ' ') for name in columns)} |",
        "| --- " * len(columns) + "|",
    ]
    body = [f"| {' | '.join(text_of(row.get(name)) for name in columns)} |" for row in rows]
    return "\n".join([*head, *body])


def text_of(value: Any) -> str:
    """Return a table's cell: floats have three or four significant digits."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
