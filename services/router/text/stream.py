"""One answer as a stream of text: its tokens from the workers, its text from the assembler."""

from __future__ import annotations

from typing import Protocol

from pagewire.shared.control.protocol import FinishReason, TokenOutput
from pagewire.shared.errors import RequestFailedError
from pagewire.shared.text.answer_text import TextAssembler, TextDelta, TextFinishReason


class TokenSource(Protocol):
    """One sequence's tokens, see `dispatch.TokenStream`."""

    async def __anext__(self) -> TokenOutput:
        """Return what the workers sent, until a finish reason."""
        ...

    def close(self, reason: FinishReason = "abort") -> None:
        """Stop the sequence, if it runs yet, and free what it holds everywhere."""
        ...


class AnswerStream:
    """One answer as text. Iterate to its end, or `close` it.

    Args:
        generates: whether the answer has tokens; otherwise it ends where the first would be.

    Attributes:
        cached_tokens: prompt tokens that nobody had to compute; known with the first output.
    """

    def __init__(
        self, source: TokenSource, assembler: TextAssembler, generates: bool = True
    ) -> None:
        self.cached_tokens: int | None = None
        self._source, self._assembler, self._generates = source, assembler, generates
        self._ended = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._assembler.num_tokens

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> TextDelta:
        """Return the next delta, one per arrival of tokens; the last one has a `finish_reason`.

        Raises:
            PagewireError: it failed.
        """
        if self._ended:
            raise StopAsyncIteration
        output = await self._source.__anext__()
        if output.prompt_logprobs is not None:
            return TextDelta("", prompt_logprobs=output.prompt_logprobs.tokens)
        if self.cached_tokens is None:  # what a migration finds cached is the answer itself
            self.cached_tokens = output.cached_tokens
        finish_reason = _finish_reason(output)
        if self._generates:
            delta = self._assembler.push(output.token_ids, finish_reason, output.logprobs)
        else:
            delta = TextDelta("", "length")
        if delta.finish_reason is not None:
            self._ended = True
            # At a stop string, which only the router knows, the worker goes on until cancelled.
            self._source.close(delta.finish_reason)
        return delta

    def close(self) -> None:
        """Stop the answer, if it runs yet."""
        self._source.close()


def _finish_reason(output: TokenOutput) -> TextFinishReason | None:
    reason = output.finish_reason
    if reason is None or reason == "stop" or reason == "length":
        return reason
    raise RequestFailedError(f"a worker ended the request: {output.error or reason}")
