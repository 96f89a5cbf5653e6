"""Finds the tokens, with their log probabilities, that belong to a part of an answer's text."""

from __future__ import annotations

from codecs import getincrementaldecoder

from pagewire.services.router.http.api.openai.logprobs import chat_logprobs
from pagewire.services.router.http.api.openai.objects import ChatToken
from pagewire.shared.request.logprobs import Logprobs
from pagewire.shared.text.token_bytes import TokenBytes

_utf8_decoder = getincrementaldecoder("utf-8")


class PendingLogprobs:
    """Log probabilities of tokens that have come, until their text is known to be of an item.

    An answer's text is split into reasoning, content and calls, and markers between them are of
    none; so tokens are found by their bytes.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._entries: list[ChatToken] = []
        self._is_first_taken = False  # the first token was returned, but goes on in the next text

    def push(self, tokens: Logprobs | None) -> None:
        """Add the tokens of a delta."""
        if tokens:
            self._entries += chat_logprobs(tokens, self._token_bytes).content

    def take(self, text: str) -> list[ChatToken]:
        """Return the tokens of the next text, and drop those before it.

        A text that no tokens spell out, such as arguments that are written again, takes none.
        """
        if not text:
            return []
        decoder = _utf8_decoder("replace")
        whole, spans = "", []
        for entry in self._entries:
            start = len(whole)
            whole += decoder.decode(bytes(entry.bytes))
            is_cut = decoder.getstate()[0] != b""  # its last bytes begin one more character
            spans.append((start, len(whole) + is_cut))
        begin = (whole + decoder.decode(b"", True)).find(text)
        if begin < 0:
            return []
        end = begin + len(text)
        taken, rest, was_taken = [], [], self._is_first_taken
        self._is_first_taken = False
        for entry, (start, stop) in zip(self._entries, spans, strict=True):
            if start < end and stop > begin and not was_taken:
                taken.append(entry)
            if start >= end or stop > end:
                self._is_first_taken |= start < end
                rest.append(entry)
            was_taken = False
        self._entries = rest
        return taken
