"""Turns the tokens of one answer, as workers send them, into text."""

from __future__ import annotations

import time

from pagewire.shared.base.errors import BusyError, InvalidRequestError, RequestFailedError
from pagewire.shared.control.protocol import TokenOutput
from pagewire.shared.text.answer_text import TextAssembler, TextDelta


class AnswerStream:
    """Turns the outputs of workers for one answer into text.

    Args:
        generates: whether the answer has tokens; otherwise it ends before the first one.

    Attributes:
        cached_tokens: prompt tokens that were cached; known with the first output.
        first_at: time of the first output, on the monotonic clock.
    """

    __slots__ = ("_assembler", "_generates", "cached_tokens", "first_at")

    def __init__(self, assembler: TextAssembler, generates: bool = True) -> None:
        self.cached_tokens: int | None = None
        self.first_at: float | None = None
        self._assembler, self._generates = assembler, generates

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._assembler.num_tokens

    def push(self, output: TokenOutput) -> TextDelta:
        """Return what an output adds; nothing may be pushed after a delta with a `finish_reason`.

        Raises:
            InvalidRequestError: a worker could not do what the client asked for.
            BusyError: a worker had no time for the request.
            RequestFailedError: a worker failed or aborted the request.
        """
        if output.prompt_logprobs is not None:
            return TextDelta("", prompt_logprobs=output.prompt_logprobs.tokens)
        if self.cached_tokens is None:  # not those of a migration
            self.cached_tokens = output.cached_tokens
            self.first_at = self.first_at or time.monotonic()
        reason = output.finish_reason
        if reason is None or reason == "stop" or reason == "length":
            if not self._generates:
                return TextDelta("", "length")
            return self._assembler.push(output.token_ids, reason, output.logprobs)
        if reason == "error" and output.param is not None:
            raise InvalidRequestError(output.error or "the request cannot be done", output.param)
        if output.is_busy:
            raise BusyError(output.error or "the worker had no time")
        raise RequestFailedError(f"a worker ended the request: {output.error or reason}")
