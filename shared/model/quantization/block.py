"""Reads the size of weight blocks, a field that several dialects have."""

from __future__ import annotations

from typing import Any

from pagewire.shared.model.fields import MAX_WIDTH, Fields

_LEAST_COLUMNS = 32  # of a block: a matrix instruction takes as many inputs in FP8


def read_block(fields: Fields, name: str, value: Any) -> tuple[int, int]:
    """Return the rows and columns of a block of weights that has one scale.

    Raises:
        ModelLoadError: it is something else than two numbers, or kernels cannot compute such
            blocks; one line.
    """
    if isinstance(value, str):  # compressed-tensors' older spelling
        value = [int(part) if part.isdecimal() else part for part in value.split("x")]
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or any(type(n) is not int or not 0 < n <= MAX_WIDTH for n in value):
        raise fields.error(f"{name} must be two positive integers, not {value!r:.80}")
    rows, columns = value
    if columns < _LEAST_COLUMNS or columns & (columns - 1):
        raise fields.error(
            f"{name} {value!r} is not supported: the second number must be a power of two from "
            f"{_LEAST_COLUMNS} on, such as 128"
        )
    return rows, columns
