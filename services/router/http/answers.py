"""All answers to one request: several prompts, several choices each, as one stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial

from pagewire.services.router.dispatch.dispatcher import Dispatcher
from pagewire.services.router.http.backlog import Backlog
from pagewire.services.router.http.inputs import GenerationInput
from pagewire.services.router.text.stream import AnswerStream
from pagewire.shared.aio import end_task
from pagewire.shared.control.protocol import TokenOutput
from pagewire.shared.errors import InvalidRequestError
from pagewire.shared.text.answer_text import TextAssembler, TextDelta, join_deltas
from pagewire.shared.text.tokenizer import Tokenizer

# Takes a delta the moment it arrives; returns whether it did.
Push = Callable[[int, TextDelta], bool]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Attributes:
        reasoning_tokens: of the completion's; None where reasoning is not split off.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None


class AnswerSet:
    """The answers to one request, in the order of prompts and then of choices. Must be closed.

    Each delta goes to the reader's `Push`, within the call that took it from the worker. What that
    does not take, or what arrives while the reader is busy, waits for `deltas`.

    Raises:
        OverloadedError: from the constructor, the queue is full.
    """

    def __init__(
        self, dispatcher: Dispatcher, tokenizer: Tokenizer, asked: GenerationInput
    ) -> None:
        self._asked = asked
        self._sources = dispatcher.open((p.token_ids, p.spec, asked.n) for p in asked.prompts)
        self._answers = [
            AnswerStream(TextAssembler(tokenizer, prompt.token_ids, asked.rules), asked.generates)
            for prompt in asked.prompts
            for _ in range(asked.n)
        ]
        for index, source in enumerate(self._sources):
            source.sink = partial(self._on_output, index)
        self._push: Push | None = None
        self._is_idle = False  # the reader waits, and has taken all there was
        self._backlog = Backlog()
        self._arrived = asyncio.Event()
        self._unended = len(self._answers)
        self._failure: BaseException | None = None

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever the number of its choices."""
        n = self._asked.n
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._asked.prompts),
            completion_tokens=sum(answer.num_tokens for answer in self._answers),
            cached_tokens=sum(answer.cached_tokens or 0 for answer in self._answers[::n]),
        )

    def push_to(self, push: Push) -> None:
        """Have deltas passed on the moment they arrive, as long as `deltas` has none left."""
        self._push = push

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Run all answers until they end; yield index and delta of what was not pushed.

        Raises:
            PagewireError: one of them failed.
        """
        tasks = [asyncio.create_task(source.run()) for source in self._sources]
        for task in tasks:
            task.add_done_callback(self._on_done)
        try:
            while True:
                self._arrived.clear()
                while (item := self._backlog.take()) is not None:
                    yield item
                if self._failure is not None:
                    raise self._failure
                if not self._unended:
                    return
                self._is_idle = True
                await self._arrived.wait()
        finally:
            self._is_idle = False
            for task in tasks:
                await end_task(task)

    async def collect(self) -> list[TextDelta]:
        """Return all answers when they are complete, each as one part.

        Raises:
            PagewireError: one of them failed.
        """
        parts: list[list[TextDelta]] = [[] for _ in self._answers]

        def take(index: int, delta: TextDelta) -> bool:
            parts[index].append(delta)
            return True

        self.push_to(take)
        async for index, delta in self.deltas():
            take(index, delta)
        return [join_deltas(of_answer) for of_answer in parts]

    def close(self) -> None:
        """Stop what still runs. Idempotent."""
        for source in self._sources:
            source.close()

    def _on_output(self, index: int, output: TokenOutput) -> None:
        delta = self._answers[index].push(output)
        if delta.finish_reason is not None:
            self._unended -= 1
            # At a stop string, which only the router knows, the worker goes on until cancelled.
            self._sources[index].close(delta.finish_reason)
        if not (self._is_idle and self._push is not None and self._push(index, delta)):
            self._backlog.put(index, delta)
            self._wake()
        elif not self._unended:
            self._wake()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or self._in_fields_of_client(failure)
            self._wake()

    def _in_fields_of_client(self, failure: BaseException) -> BaseException:
        """Return a failure of a grammar as one of the field that has asked for it."""
        field = self._asked.form_field
        if not (isinstance(failure, InvalidRequestError) and failure.param == "grammar" and field):
            return failure
        return InvalidRequestError(f"{field}: {failure.message}", field)

    def _wake(self) -> None:
        self._is_idle = False
        self._arrived.set()
