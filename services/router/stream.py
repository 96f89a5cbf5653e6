"""From the tokens of one sequence to its text: detokenized, cut at stop strings, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pagewire.services.router.metrics import Ending
from pagewire.services.router.stop_strings import StopMatcher
from pagewire.shared.errors import RequestFailedError
from pagewire.shared.protocol import TokenOutput
from pagewire.shared.tokenizer import IncrementalDetokenizer, Tokenizer

AnswerEnd = Literal["stop", "length"]


class TokenSource(Protocol):
    """One sequence's tokens, see `dispatch.TokenStream`."""

    async def __anext__(self) -> TokenOutput:
        """Return what the workers sent, until a finish reason."""
        ...

    def close(self, ending: Ending = "abort") -> None:
        """Stop the sequence, if it runs yet, and free what it holds everywhere."""
        ...


@dataclass(slots=True)
class TextDelta:
    """A piece of an answer.

    Attributes:
        text: may be empty.
        end: why the answer ends here, None if it goes on.
        token_ids: that came with it; their text may come later.
    """

    text: str
    end: AnswerEnd | None = None
    token_ids: tuple[int, ...] = ()


class TextAssembler:
    """The pure part: tokens in, text out.

    Attributes:
        num_tokens: tokens of the answer so far; those behind a stop string don't count.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str]
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stops)

    def push(self, token_ids: Sequence[int], end: AnswerEnd | None) -> TextDelta:
        """Add tokens, the last ones if `end` says why.

        Tokens go one by one, so that the count stops with the one that completes a stop string,
        in whatever groups they come.
        """
        pieces = []
        for count, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            pieces.append(self._matcher.push(self._detokenizer.push([token_id])))
            if self._matcher.matched:
                return TextDelta("".join(pieces), "stop", tuple(token_ids[:count]))
        if end is not None:
            pieces.append(self._matcher.push(self._detokenizer.flush()))
            if self._matcher.matched:
                end = "stop"
            pieces.append(self._matcher.flush())
        return TextDelta("".join(pieces), end, tuple(token_ids))


class AnswerStream:
    """One answer as text. Iterate to its end, or `close` it.

    Attributes:
        cached_tokens: prompt tokens that nobody had to compute; known with the first output.
    """

    def __init__(self, source: TokenSource, assembler: TextAssembler) -> None:
        self.cached_tokens: int | None = None
        self._source, self._assembler = source, assembler
        self._ended = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._assembler.num_tokens

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> TextDelta:
        """Return the next piece, one per arrival of tokens; the last one has an `end`.

        Raises:
            PagewireError: it failed.
        """
        if self._ended:
            raise StopAsyncIteration
        output = await self._source.__anext__()
        if self.cached_tokens is None:  # what a move found cached is the answer itself
            self.cached_tokens = output.cached_tokens
        delta = self._assembler.push(output.token_ids, _end(output))
        if delta.end is not None:
            self._ended = True
            # At a stop string, which only the router knows, the worker goes on till told.
            self._source.close("stop")
        return delta

    def close(self) -> None:
        """Stop the answer, if it runs yet."""
        self._source.close()


def _end(output: TokenOutput) -> AnswerEnd | None:
    reason = output.finish_reason
    if reason is None or reason == "stop" or reason == "length":
        return reason
    raise RequestFailedError(f"a worker ended the request: {output.error or reason}")
