"""Finds stop strings in text that arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string.

    The first stop string is the one that is complete first; if several end at once, it is the
    longest of them. So the result does not depend on how the text is cut into parts.

    Args:
        stops: the stop strings.
        include: let the stop string through as well.

    Attributes:
        matched_stop: the stop string that was found; no text after it is let through.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.matched_stop: str | None = None
        self._stops, self._include = tuple(stops), include
        self._held = ""  # the longest end of the text that may begin a stop string

    @property
    def matched(self) -> bool:
        """Whether a stop string was found."""
        return self.matched_stop is not None

    def push(self, text: str, may_stop: bool = True) -> str:
        """Add text; return the text, including held text, that cannot be part of a stop string.

        Args:
            text: what comes next.
            may_stop: whether a stop string that ends in it counts.
        """
        if not self._stops or self.matched:
            return "" if self.matched else text
        known = len(self._held)  # none that ends in it counts any more
        text = self._held + text
        stops = self._stops if may_stop else ()
        matches = [
            (at + len(s), at, s)
            for s in stops
            if (at := text.find(s, max(0, known - len(s) + 1))) >= 0
        ]
        if matches:
            end, at, self.matched_stop = min(matches)
            self._held = ""
            return text[: end if self._include else at]
        hold = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
