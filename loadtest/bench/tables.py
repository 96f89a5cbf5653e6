"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def markdown(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    """Return a table of these columns; floats have three or four significant digits."""
    head = [
        f"| {' | '.join(name.replace('_', ' ') for name in columns)} |",
        "| --- " * len(columns) + "|",
    ]
    body = [f"| {' | '.join(_text(row.get(name)) for name in columns)} |" for row in rows]
    return "\n".join([*head, *body])


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
