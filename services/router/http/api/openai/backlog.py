"""Holds the parts of answers that could not be sent yet."""

from __future__ import annotations

from collections import deque

from pagewire.shared.text.answer_text import TextDelta, join_deltas

MAX_JOINED_TOKENS = 256  # in one part: a reader's backlog must not hold up the event loop


class Backlog:
    """Deltas in the order of arrival, joined by answer, so that they hold little but their text."""

    def __init__(self) -> None:
        self._parts: dict[int, deque[TextDelta]] = {}

    def put(self, index: int, delta: TextDelta) -> None:
        """Add a delta of an answer."""
        parts = self._parts.setdefault(index, deque())
        if parts and _num_tokens(parts[-1]) + _num_tokens(delta) <= MAX_JOINED_TOKENS:
            delta = join_deltas([parts.pop(), delta])
        parts.append(delta)

    def take(self) -> tuple[int, TextDelta] | None:
        """Return an answer's index and its oldest part; None if nothing is left."""
        for index, parts in self._parts.items():
            delta = parts.popleft()
            if not parts:
                del self._parts[index]
            return index, delta
        return None


def _num_tokens(delta: TextDelta) -> int:
    return len(delta.token_ids) + len(delta.prompt_logprobs or ())
