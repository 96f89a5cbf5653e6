"""Answers that are not streamed: all of their parts are kept until they end."""

import asyncio
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from pagewire.services.router.dispatch.sender import Sender
from pagewire.services.router.http.api.openai.answer_set import AnswerSet
from pagewire.shared.control.protocol import TokenOutput
from pagewire.shared.request.logprobs import Logprobs
from pagewire.shared.text.answer_text import TextDelta
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.request_bodies import MODEL, completion

LENGTH = 10_000


class Source:
    """One answer, whose tokens come from the test."""

    def __init__(self, sink: Callable[[TokenOutput], None]) -> None:
        self.sink = sink
        self._done = asyncio.Event()

    async def run(self) -> None:
        await self._done.wait()

    def close(self, _reason: str = "abort") -> None:
        self._done.set()


def output(token_id: int, finish_reason: str | None = None) -> TokenOutput:
    known = Logprobs(1, struct.pack("i", token_id), struct.pack("f", -1.0), struct.pack("i", 1))
    return TokenOutput(
        request_id="r", token_ids=[token_id], finish_reason=finish_reason, logprobs=known
    )


def test_a_token_of_a_collected_answer_takes_little_memory_until_the_end():
    async def scenario() -> tuple[list[TextDelta], float]:
        sources: list[Source] = []

        def opened(_requests: Any, sink: Any, *_others: Any) -> list[Source]:
            sources.extend(Source(partial(sink, index)) for index in range(2))
            return sources

        asked = completion(n=2, logprobs=0)
        answers = AnswerSet(SimpleNamespace(open=opened), MODEL, asked, Sender("r", "its owner"))
        collecting = asyncio.create_task(answers.collect())
        await eventually(lambda: answers._is_idle)
        tracemalloc.start()
        for token_id in range(LENGTH):
            for source in sources:
                source.sink(output(token_id % 256))
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for source in sources:
            source.sink(output(7, "length"))
        return await collecting, size / (2 * LENGTH)

    whole, bytes_of_token = run_async(scenario())
    assert bytes_of_token < 100
    for answer in whole:
        assert answer.finish_reason == "length"
        assert answer.token_ids == (*(each % 256 for each in range(LENGTH)), 7)
        assert answer.logprobs is not None
        assert [token.id for token in answer.logprobs] == list(answer.token_ids)
