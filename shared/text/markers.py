"""The texts of a vocabulary that grammars know by their tokens' ids alone."""

from __future__ import annotations

import re
from collections.abc import Mapping


class Markers:
    """Finds special tokens that a text spells out.

    Args:
        ids: of the tokens, by their texts.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str) -> list[str | int]:
        """Return a text as what lies between such tokens, never empty, and the tokens' ids."""
        found: list[str | int] = []
        end = 0
        for match in self._pattern.finditer(text):
            found += [text[end : match.start()], self.ids[match[0]]]
            end = match.end()
        return [part for part in (*found, text[end:]) if part != ""]


NO_MARKERS = Markers({})
