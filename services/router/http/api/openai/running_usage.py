"""The usage so far, which each chunk of a stream has if `continuous_usage_stats` asks for it."""

from __future__ import annotations

from typing import Any

from pagewire.shared.text.answer_text import TextDelta


class RunningUsage:
    """Counts the tokens of a request's answers as they are sent, all choices together.

    Args:
        prompt_tokens: of all prompts, each once.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    def add(self, delta: TextDelta) -> None:
        """Count a delta. It may have no chunk of its own; the next one has its tokens then."""
        self._completion_tokens += len(delta.token_ids)

    def fields(self) -> dict[str, Any]:
        """Return the usage object of a chunk."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }
