"""What a worker has sent for one attempt at a request and its reader has not taken yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pagewire.shared.protocol import Refused, TokenOutput


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker is gone, and the request with it."""

    reason: str


class Mailbox:
    """Collects a request's events for one reader.

    Tokens that a slow reader has not taken are joined into one output, so that it holds no more
    than the answer's tokens. An end (refusal, loss) comes after the tokens before it.
    """

    def __init__(self) -> None:
        self._output: TokenOutput | None = None
        self._end: Refused | Lost | None = None
        self._arrived = asyncio.Event()

    def put_output(self, output: TokenOutput) -> None:
        """Add what a step gave."""
        self._output = output if self._output is None else _joined(self._output, output)
        self._arrived.set()

    def put_end(self, end: Refused | Lost) -> None:
        """End the attempt without a finish reason."""
        if self._end is None:
            self._end = end
            self._arrived.set()

    async def take(self, timeout: float) -> TokenOutput | Refused | Lost:
        """Return what has arrived; wait for it if there is nothing.

        Raises:
            TimeoutError: nothing arrived in time.
        """
        while True:
            if self._output is not None:
                output, self._output = self._output, None
                return output
            if self._end is not None:
                return self._end
            self._arrived.clear()
            async with asyncio.timeout(timeout):
                await self._arrived.wait()


def _joined(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    cached = first.cached_tokens if second.cached_tokens is None else second.cached_tokens
    return TokenOutput(
        request_id=second.request_id,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
        cached_tokens=cached,
        prefill_worker=second.prefill_worker or first.prefill_worker,
        error=second.error,
        timings=second.timings or first.timings,
    )
