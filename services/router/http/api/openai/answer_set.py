"""All answers to one request: several prompts, several choices each, as one stream of deltas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from pagewire.services.router.dispatch.answer_times import MeasureOptions
from pagewire.services.router.dispatch.dispatcher import Dispatcher
from pagewire.services.router.dispatch.embeddings import EmbeddingSet
from pagewire.services.router.dispatch.sender import Sender
from pagewire.services.router.http.api.openai.backlog import Backlog
from pagewire.services.router.http.api.openai.generation import GenerationInput
from pagewire.services.router.http.api.openai.timings import RequestTimings, timings_field
from pagewire.services.router.text.served_model import ServedModel
from pagewire.services.router.text.stream import AnswerStream
from pagewire.shared.base.aio import end_task
from pagewire.shared.base.errors import InvalidRequestError
from pagewire.shared.control.protocol import Timings, TokenOutput
from pagewire.shared.text.answer_text import AnswerParts, TextAssembler, TextDelta, join_deltas
from pagewire.shared.tool_calls.answer_parts import answer_parts

JOINED_PARTS = 64  # of a collected answer: joined, a token takes a tenth of the memory

# Takes a delta the moment it arrives; returns whether it did.
Push = Callable[[int, TextDelta], bool]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, and where its time went.

    Attributes:
        reasoning_tokens: completion tokens that are reasoning; None if it is not split off.
        timings: the response's field of this name, if it was asked for.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    timings: RequestTimings | UnsetType = UNSET


class EmbeddingAnswers:
    """The counts of a request's embeddings for its log line, see `AnswerSet`."""

    def __init__(self, embeddings: EmbeddingSet) -> None:
        self._embeddings = embeddings
        self.usage = Usage(embeddings.num_tokens, completion_tokens=0, cached_tokens=0)
        self.finish_reasons: list[str] = []
        self.first_token_at, self.timings = None, None

    @property
    def workers(self) -> list[str]:
        """Ids of the workers that have computed some, each once."""
        return self._embeddings.workers


class AnswerSet:
    """The answers to one request, in the order of prompts and then of choices. Must be closed.

    Each delta is passed to the reader's `Push` in the same call in which it came from the worker.
    Deltas that `Push` does not accept, or that arrive while the reader is busy, wait for `deltas`.

    Attributes:
        finish_reasons: the reasons of the answers that have ended, each once.

    Args:
        dispatcher: has workers generate the answers.
        model: the model, whose tokenizer turns tokens into text.
        request: the checked request.
        sender: who sent it.
        start: arrival of the request, on the monotonic clock; None means now.
        trace: the request's span, if it is traced.

    Raises:
        OverloadedError: the queue is full (raised by the constructor).
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        request: GenerationInput,
        sender: Sender,
        start: float | None = None,
        trace: str | None = None,
    ) -> None:
        self._request, self._admitted_at = request, time.monotonic()
        self._start = self._admitted_at if start is None else start
        self._ended_at: float | None = None
        requests = (
            (prompt.token_ids, sender.sign(prompt.spec), request.n) for prompt in request.prompts
        )
        measures = MeasureOptions(request.timings, bool(request.rules.stops), trace)
        session = sender.session_number
        self._sources = dispatcher.open(requests, self._on_output, session, measures)
        self._answers = [
            AnswerStream(_assembler(model, request, prompt.token_ids), request.generates)
            for prompt in request.prompts
            for _ in range(request.n)
        ]
        self._push: Push | None = None
        self._is_idle = False  # the reader waits for deltas and has read all earlier ones
        self._backlog = Backlog()
        self._arrived = asyncio.Event()
        self._unended = len(self._answers)
        self.finish_reasons: list[str] = []
        self._failure: BaseException | None = None

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever the number of its choices."""
        n = self._request.n
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._request.prompts),
            completion_tokens=sum(answer.num_tokens for answer in self._answers),
            cached_tokens=sum(answer.cached_tokens or 0 for answer in self._answers[::n]),
            timings=self._timings_field() if self._request.timings else UNSET,
        )

    def _timings_field(self) -> RequestTimings:
        first, ended = self.first_token_at, self._ended_at
        return timings_field(
            self._admitted_at - self._start,
            None if first is None else first - self._start,
            (time.monotonic() if ended is None else ended) - self._start,
            [source.times for source in self._sources],
        )

    @property
    def first_token_at(self) -> float | None:
        """When the first token arrived, on the monotonic clock; None before that."""
        return min((a.first_at for a in self._answers if a.first_at is not None), default=None)

    @property
    def timings(self) -> Timings | None:
        """The workers' measurements of the answer whose first token came first, if known."""
        answers = [source.times for source in self._sources]
        started = [answer for answer in answers if answer.first_token_s is not None]
        first = min(started, key=lambda each: each.first_token_s or 0.0, default=None)
        return None if first is None else first.reported

    @property
    def workers(self) -> list[str]:
        """Ids of the workers that have answered, each once, in the order of their answers."""
        return list(dict.fromkeys(name for source in self._sources for name in source.workers))

    def push_to(self, push: Push) -> None:
        """Call a function with each delta as it arrives, while none wait for `deltas`."""
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
        joined: list[list[TextDelta]] = [[] for _ in self._answers]

        def take(index: int, delta: TextDelta) -> bool:
            parts[index].append(delta)
            if len(parts[index]) == JOINED_PARTS:
                joined[index].append(join_deltas(parts[index]))
                parts[index].clear()
            return True

        self.push_to(take)
        async for index, delta in self.deltas():
            take(index, delta)
        return [join_deltas(joined[index] + rest) for index, rest in enumerate(parts)]

    def close(self) -> None:
        """Stop the answers that still run. Idempotent."""
        for source in self._sources:
            source.close()
            source.sink = _ignore  # which leads back here: a cycle would be garbage

    def _on_output(self, index: int, output: TokenOutput) -> None:
        delta = self._answers[index].push(output)
        if delta.finish_reason is not None:
            self._unended -= 1
            self._ended_at = None if self._unended else time.monotonic()
            if delta.finish_reason not in self.finish_reasons:
                self.finish_reasons.append(delta.finish_reason)
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
        """Return an error of a grammar as an error of the request's field that asked for it."""
        field = self._request.form_field
        if not (isinstance(failure, InvalidRequestError) and failure.param == "grammar" and field):
            return failure
        return InvalidRequestError(f"{field}: {failure.message}", field)

    def _wake(self) -> None:
        self._is_idle = False
        self._arrived.set()


def _assembler(
    model: ServedModel, request: GenerationInput, prompt_ids: list[int]
) -> TextAssembler:
    parts: AnswerParts | None = None
    if request.rules.stops:
        parts = answer_parts(model.syntax, request.parsing)
    return TextAssembler(model.tokenizer, prompt_ids, request.rules, parts)


def _ignore(_output: TokenOutput) -> None:
    """Ignore the output for a request that has ended."""
