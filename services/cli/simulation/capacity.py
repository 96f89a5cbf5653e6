"""Searches for the highest load at which a simulated cluster keeps its promise."""

from __future__ import annotations

from collections.abc import Callable

STEPS = 6  # bisections after the bounds are known
HIGHEST, LOWEST = 64.0, 1 / 64


def in_words(factor: float) -> str:
    """Return what a result of `highest_factor` says, such as "1.50 times this load"."""
    if factor >= HIGHEST:
        return f"at least {HIGHEST:g} times this load"
    return f"{factor:.2f} times this load" if factor else f"less than 1/{1 / LOWEST:g} of this load"


def highest_factor(keeps: Callable[[float], bool]) -> float:
    """Return the highest factor at which `keeps` holds, by halving the range again and again.

    The result is exact to 2 ** (1 / 2 ** STEPS), which is 1.1 %.

    Args:
        keeps: whether the promise is kept at a factor. Best if it holds up to one factor and not
            beyond; it is called about `STEPS` + 2 times.

    Returns:
        0 if it does not even hold at `LOWEST`; at most `HIGHEST`.
    """
    low = high = 1.0
    if keeps(1.0):
        while keeps(high := 2 * low):
            low = high
            if low >= HIGHEST:
                return low
    else:
        while not keeps(low := high / 2):
            high = low
            if high <= LOWEST:
                return 0.0
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
