"""All answers to one request: several prompts, several choices each, as one stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pagewire.services.router.dispatch.dispatcher import Dispatcher
from pagewire.services.router.http.inputs import GenerationInput
from pagewire.services.router.text.stream import AnswerStream
from pagewire.shared.aio import end_task
from pagewire.shared.text.answer_text import TextAssembler, TextDelta, join_deltas
from pagewire.shared.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class AnswerSet:
    """The answers to one request, in the order of prompts and then of choices. Must be closed.

    Raises:
        OverloadedError: from the constructor, the queue is full.
    """

    def __init__(
        self, dispatcher: Dispatcher, tokenizer: Tokenizer, asked: GenerationInput
    ) -> None:
        self._asked = asked
        sources = dispatcher.open((p.token_ids, p.spec, asked.n) for p in asked.prompts)
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.n)]
        self._answers = [
            AnswerStream(
                source, TextAssembler(tokenizer, prompt.token_ids, asked.stops), asked.generates
            )
            for source, prompt in zip(sources, prompts, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever the number of its choices."""
        n = self._asked.n
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._asked.prompts),
            completion_tokens=sum(answer.num_tokens for answer in self._answers),
            cached_tokens=sum(answer.cached_tokens or 0 for answer in self._answers[::n]),
        )

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield index and delta, in the order of arrival, until all answers have ended.

        Raises:
            PagewireError: one of them failed.
        """
        if len(self._answers) == 1:
            async for delta in self._answers[0]:
                yield 0, delta
            return
        merge = _Merge(self._answers)
        try:
            while not merge.is_done:
                for item in await merge.take():
                    yield item
        finally:
            await merge.close()

    async def collect(self) -> list[TextDelta]:
        """Return all answers when they are complete, each as one part.

        Raises:
            PagewireError: one of them failed.
        """
        parts: list[list[TextDelta]] = [[] for _ in self._answers]
        async for index, delta in self.deltas():
            parts[index].append(delta)
        return [join_deltas(of_answer) for of_answer in parts]

    def close(self) -> None:
        """Stop what still runs. Idempotent."""
        for answer in self._answers:
            answer.close()


class _Merge:
    """Reads several answers at once; deltas that nobody took yet are joined by answer."""

    def __init__(self, answers: list[AnswerStream]) -> None:
        self._arrived = asyncio.Event()
        self._waiting: dict[int, TextDelta] = {}
        self._unended = len(answers)
        self._failure: BaseException | None = None
        self._tasks = [
            asyncio.create_task(self._read(index, answer)) for index, answer in enumerate(answers)
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_done)

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended and all deltas are taken."""
        return not self._unended and not self._waiting

    async def take(self) -> list[tuple[int, TextDelta]]:
        """Return what has arrived, waiting for something; waits as long as the answers do."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        taken, self._waiting = self._waiting, {}
        return sorted(taken.items())

    async def close(self) -> None:
        """Stop reading."""
        for task in self._tasks:
            await end_task(task)

    async def _read(self, index: int, answer: AnswerStream) -> None:
        async for delta in answer:
            before = self._waiting.get(index)
            self._waiting[index] = delta if before is None else join_deltas([before, delta])
            self._arrived.set()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._unended -= 1
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
        self._arrived.set()
