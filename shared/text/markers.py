"""Finds special tokens in a text: grammars of answers and tool calls name these by their ids."""

from __future__ import annotations

import re
from collections.abc import Mapping


class Markers:
    """Finds special tokens that a text spells out.

    Args:
        ids: the tokens' ids, by their texts.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str) -> list[str | int]:
        """Split a text into the tokens' ids and the texts between them, which are never empty."""
        parts: list[str | int] = []
        end = 0
        for match in self._pattern.finditer(text):
            parts += [text[end : match.start()], self.ids[match[0]]]
            end = match.end()
        return [part for part in (*parts, text[end:]) if part != ""]


NO_MARKERS = Markers({})
