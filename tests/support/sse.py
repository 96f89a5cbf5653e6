"""The events of a streamed answer, read as the command line's client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import httpx

from pagewire.services.cli.client.sse import EventParser


def events_of(body: Iterable[bytes]) -> Iterator[Any]:
    """Yield each event of an answer, which ends with [DONE]."""
    reader = _Reader()
    for data in body:
        yield from reader.feed(data)
    assert reader.is_done, "the stream ended before the answer was complete"


async def arriving_events(response: httpx.Response) -> AsyncIterator[Any]:
    """Yield each event as it arrives; the answer ends with [DONE]."""
    reader = _Reader()
    async for data in response.aiter_bytes():
        for event in reader.feed(data):
            yield event
    assert reader.is_done, "the stream ended before the answer was complete"


class _Reader:
    def __init__(self) -> None:
        self._parser = EventParser()
        self.is_done = False

    def feed(self, data: bytes) -> Iterator[Any]:
        for event in self._parser.feed(data):
            assert not self.is_done, "an event after [DONE]"
            self.is_done = event == b"[DONE]"
            if not self.is_done:
                yield json.loads(event)
