"""The ASGI side of a stream, with a server and a client of the test's own."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from pagewire.services.router.http.api.openai.answer_set import Usage
from pagewire.services.router.http.api.openai.formats import CompletionFormat
from pagewire.services.router.http.connection.http_io import EventStream
from pagewire.services.router.http.connection.record import RECORD, RequestRecord
from pagewire.shared.base.errors import NoWorkerError
from pagewire.shared.text.answer_text import TextDelta
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.request_bodies import MODEL, completion


class Answers:
    usage = Usage(1, 2, 0)
    closed = False

    def push_to(self, push: object) -> None:
        raise AssertionError("there is no transport to write to")

    def close(self) -> None:
        self.closed = True


class Client:
    """Takes the first `takes` messages and then nothing; leaves when it is to."""

    def __init__(self, takes: int = 1000, path: str = "/v1/completions") -> None:
        self.taken: list[dict] = []
        self.left = asyncio.Event()
        self.record = RequestRecord({"headers": []})
        self.asgi = {RECORD: self.record, "path": path}, self.receive, self.send
        self._takes = takes

    async def send(self, message: dict) -> None:
        if len(self.taken) >= self._takes:
            await asyncio.Event().wait()
        self.taken.append(message)

    async def receive(self) -> dict:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.taken)


async def words(*texts: str, error: Exception | None = None) -> AsyncGenerator:
    for text in texts:
        yield 0, TextDelta(text)
    if error is not None:
        raise error
    yield 0, TextDelta("", "stop")


def stream(answers: Answers, rest: AsyncGenerator, timeout: float = 5) -> EventStream:
    form = CompletionFormat(MODEL, completion())
    return EventStream(answers, form, (0, TextDelta("first")), rest, timeout)


def test_a_stream_ends_with_done_and_closes_its_answers():
    async def scenario() -> None:
        answers, client = Answers(), Client()
        await stream(answers, words("a", "b"))(*client.asgi)
        assert answers.closed
        assert client.text.endswith(b"data: [DONE]\n\n")
        assert client.taken[0]["status"] == 200
        assert [m["more_body"] for m in client.taken[1:]] == [True] * 4 + [False]

    run_async(scenario())


def test_a_client_that_takes_nothing_is_given_up():
    async def scenario() -> None:
        answers, client = Answers(), Client(takes=2)
        async with asyncio.timeout(3):
            await stream(answers, words("a"), timeout=0.1)(*client.asgi)
        assert answers.closed
        assert client.record.final_outcome == "cancelled"
        assert len(client.taken) == 2

    run_async(scenario())


def test_a_client_that_leaves_while_it_is_sent_to_ends_the_stream():
    async def scenario() -> None:
        answers, client = Answers(), Client(takes=2)
        task = asyncio.create_task(stream(answers, words("a"))(*client.asgi))
        await asyncio.sleep(0.01)
        assert not answers.closed
        client.left.set()
        await asyncio.wait_for(task, 10)
        assert client.record.final_outcome == "cancelled"
        assert answers.closed

    run_async(scenario())


def test_an_error_in_mid_stream_is_anthropics_on_its_routes():
    async def scenario() -> None:
        client = Client(path="/v1/messages")
        await stream(Answers(), words("a", error=NoWorkerError("died")))(*client.asgi)
        last = client.text.rpartition(b"event: error\ndata: ")[2]
        assert last.startswith(b'{"type":"error","error":{"type":"overloaded_error"')
        assert b"[DONE]" not in client.text

    run_async(scenario())


def test_an_error_in_mid_stream_is_an_event():
    async def scenario() -> None:
        answers, client = Answers(), Client()
        rest = words("a", error=NoWorkerError("10.0.0.1 died"))
        await stream(answers, rest)(*client.asgi)
        assert answers.closed
        assert b'"error":{"message":"No worker' in client.text
        assert b"10.0.0.1" not in client.text
        assert (client.record.final_outcome, "10.0.0.1" in str(client.record.error)) == (
            "failed",
            True,
        )
        assert not client.taken[-1]["more_body"]

    run_async(scenario())


def test_a_bug_in_mid_stream_reaches_the_server_and_closes_the_answers(caplog):
    async def scenario() -> None:
        answers, client = Answers(), Client()
        with pytest.raises(ZeroDivisionError):
            await stream(answers, words(error=ZeroDivisionError()))(*client.asgi)
        assert answers.closed

    run_async(scenario())


def test_cancelling_the_server_closes_the_answers():
    async def scenario() -> None:
        answers, client = Answers(), Client(takes=1)
        task = asyncio.create_task(stream(answers, words("a"))(*client.asgi))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert answers.closed

    run_async(scenario())
