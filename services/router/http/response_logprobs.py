"""Which tokens of an answer a part of its text has."""

from __future__ import annotations

from typing import Any

from pagewire.services.router.http.logprobs import chat_logprobs
from pagewire.shared.logprobs import Logprobs
from pagewire.shared.text.token_bytes import TokenBytes
from pagewire.shared.text.tokenizer import REPLACEMENT


class PendingLogprobs:
    """Log probabilities of tokens that have come, until their text is known to be of an item.

    An answer's text is split into reasoning, content and calls, and markers between them are of
    none; so tokens are found by their bytes.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._entries: list[dict[str, Any]] = []

    def push(self, tokens: Logprobs | None) -> None:
        """Add the tokens of a delta."""
        if tokens:
            self._entries += chat_logprobs(tokens, self._token_bytes)["content"]

    def take(self, text: str) -> list[dict[str, Any]]:
        """Return the tokens of the next text, and drop those before it.

        A text that no tokens spell out, such as arguments that are written again, takes none.
        """
        if not text:
            return []
        raw = b"".join(bytes(entry["bytes"]) for entry in self._entries)
        begins = text.rstrip(REPLACEMENT).encode()
        begin = raw.find(begins)
        if begin < 0:
            return []
        # A character that was cut off stands for all bytes that there are.
        end = begin + len(begins) if text[-1] != REPLACEMENT else len(raw)
        place, taken, rest = 0, [], []
        for entry in self._entries:
            start, place = place, place + len(entry["bytes"])
            if start >= end:
                rest.append(entry)
            elif place > begin:
                taken.append(entry)
        self._entries = rest
        return taken
