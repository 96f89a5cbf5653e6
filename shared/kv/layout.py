"""Whether two workers' KV blocks are interchangeable."""

from __future__ import annotations

from pagewire.shared.errors import LayoutMismatchError
from pagewire.shared.protocol import BlockLayout


def check_layout(mine: BlockLayout, theirs: BlockLayout, peer: str) -> None:
    """Compare two layouts.

    Raises:
        LayoutMismatchError: names the first field that differs, with both values.
    """
    for field in mine.__struct_fields__:
        here, there = getattr(mine, field), getattr(theirs, field)
        if here != there:
            raise LayoutMismatchError(f"{peer} has {field} {there}, this worker {here}")
