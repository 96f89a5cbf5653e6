"""What a worker has sent for one attempt at a request and its reader has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from pagewire.shared.control.protocol import Refused, TokenOutput
from pagewire.shared.logprobs import Logprobs, join

MAX_TAKEN_TOKENS = 256  # at once: a reader's backlog must not hold up the event loop


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker is gone, and the request with it."""

    reason: str


class OutputBuffer:
    """Collects a request's events for one reader.

    Tokens that a slow reader has not taken are joined, so that it holds no more than the answer's
    tokens. Log probabilities of the prompt come before them, as they were sent. An end without a
    finish reason (refusal, loss) comes after the tokens before it.
    """

    def __init__(self) -> None:
        self._prompt: deque[TokenOutput] = deque()
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._last: TokenOutput | None = None
        self._cached_tokens: int | None = None
        self._end: Refused | WorkerLost | None = None
        self._arrived = asyncio.Event()

    def put_output(self, output: TokenOutput) -> None:
        """Add what a step gave."""
        if output.prompt_logprobs is not None:
            self._prompt.append(output)
            self._arrived.set()
            return
        self._tokens += output.token_ids
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs)
        self._last = output
        if output.cached_tokens is not None:
            self._cached_tokens = output.cached_tokens
        self._arrived.set()

    def put_end(self, end: Refused | WorkerLost) -> None:
        """End the attempt without a finish reason."""
        if self._end is None:
            self._end = end
            self._arrived.set()

    async def take(self, timeout: float) -> TokenOutput | Refused | WorkerLost:
        """Return what has arrived; wait for it if there is nothing.

        Raises:
            TimeoutError: nothing arrived in time.
        """
        while True:
            if self._prompt:
                return self._prompt.popleft()
            if self._last is not None:
                return self._take_output(self._last)
            if self._end is not None:
                return self._end
            self._arrived.clear()
            async with asyncio.timeout(timeout):
                await self._arrived.wait()

    def _take_output(self, last: TokenOutput) -> TokenOutput:
        tokens = self._tokens[:MAX_TAKEN_TOKENS]
        del self._tokens[:MAX_TAKEN_TOKENS]
        is_all = not self._tokens
        if is_all:
            self._last = None
        logprobs = join(self._logprobs)
        self._logprobs = []
        if logprobs is not None and not is_all:
            self._logprobs = [logprobs.part(MAX_TAKEN_TOKENS, len(logprobs))]
            logprobs = logprobs.part(0, MAX_TAKEN_TOKENS)
        return TokenOutput(
            request_id=last.request_id,
            token_ids=tokens,
            finish_reason=last.finish_reason if is_all else None,
            cached_tokens=self._cached_tokens,
            error=last.error,
            logprobs=logprobs,
        )
