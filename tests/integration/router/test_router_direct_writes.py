"""Streams that are written past ASGI: their order, their framing, clients that take nothing."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import uvicorn

from pagewire.services.router.dispatch.sender import Sender
from pagewire.services.router.http.api.openai.answer_set import AnswerSet
from pagewire.services.router.http.api.openai.formats import CompletionFormat
from pagewire.services.router.http.connection.direct_writer import DirectWritesProtocol
from pagewire.services.router.http.connection.http_io import EventStream
from pagewire.services.router.http.connection.record import RequestRecord
from pagewire.shared.control.protocol import TokenOutput
from pagewire.shared.http.bounded_protocol import protocol_factory
from pagewire.shared.http.connections import Connections
from pagewire.shared.text.answer_text import TextRules
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.live_router import TOKENIZER
from pagewire.tests.support.request_bodies import MODEL, completion

WORDS = TOKENIZER.encode(" one two three four five six seven", add_special_tokens=False)
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Source:
    """One answer's tokens, from the test."""

    def __init__(self) -> None:
        self.sink: Callable[[TokenOutput], None]
        self.closed: list[str] = []
        self._done = asyncio.Event()

    async def run(self) -> None:
        await self._done.wait()

    def close(self, reason: str = "abort") -> None:
        self.closed.append(reason)
        self._done.set()

    def push(self, token_ids: list[int], finish_reason: str | None = None) -> None:
        output = TokenOutput(request_id="r", token_ids=token_ids, finish_reason=finish_reason)
        self.sink(output)


class Served:
    """A server whose every answer is a stream of one source; remembers what went through ASGI."""

    def __init__(self, send_timeout_s: float = 10) -> None:
        self.sources: list[Source] = []
        self.answers: list[AnswerSet] = []
        self.sent: list[dict[str, Any]] = []
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: dict[str, Any]) -> None:
            self.sent.append(message)
            await send(message)

        source = Source()
        self.sources.append(source)
        prompt = SimpleNamespace(token_ids=[1, 2, 3], spec=None)
        asked = SimpleNamespace(
            prompts=[prompt], n=1, rules=TextRules(), generates=True, timings=False
        )

        def opened(_requests: Any, sink: Any, _session: Any, _measures: Any) -> list[Source]:
            source.sink = partial(sink, 0)
            return [source]

        dispatcher = SimpleNamespace(open=opened)
        answers = AnswerSet(dispatcher, MODEL, asked, Sender("r", "its owner"))
        self.answers.append(answers)
        rest = answers.deltas()
        first = await anext(rest)
        form = CompletionFormat(MODEL, completion())
        stream = EventStream(answers, form, first, rest, self._send_timeout_s)
        scope["pagewire.request"] = RequestRecord(scope)
        await stream(scope, receive, counted)


class Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    scenario: Callable[[Served, socket.socket], Awaitable[None]], send_timeout_s: float = 10
) -> None:
    """Run a scenario with a server and a socket connected to it, whose receive buffer is small."""

    async def main() -> None:
        served = Served(send_timeout_s)
        config = uvicorn.Config(
            served,
            http=protocol_factory(DirectWritesProtocol, Connections("the test", 100, 5)),
            log_config=None,
            lifespan="off",
            ws="none",
        )
        server = Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        client.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
            await scenario(served, client)
        finally:
            client.close()
            server.should_exit = True
            await asyncio.wait_for(task, 10)

    run_async(main())


async def ask(served: Served, client: socket.socket, request: bytes = GET) -> Source:
    """Ask for a stream; return its source when the first event is sent and all else is pushed."""
    count = len(served.sources)
    await asyncio.get_running_loop().sock_sendall(client, request)
    await eventually(lambda: len(served.sources) > count)
    source = served.sources[-1]
    source.push(WORDS[:1])
    await eventually(lambda: bool(served.sent) and served.answers[-1]._is_idle)
    return source


async def read_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    async with asyncio.timeout(20):
        while not received.endswith(end):
            part = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
            assert part, received[-200:]
            received += part
    return received


def texts(response: bytes) -> list[str]:
    """The texts of a response in chunks, which must be framed as HTTP/1.1 has it."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        assert body[count : count + 2] == b"\r\n"
        whole, body = whole + body[:count], body[count + 2 :]
        if count == 0:
            assert body == b""
            break
    events = whole.removesuffix(b"\n\n").split(b"\n\n")
    assert events.pop() == b"data: [DONE]"
    return [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]


def test_events_are_written_at_once_and_the_connection_is_kept():
    async def scenario(served: Served, client: socket.socket) -> None:
        for _ in range(2):
            source = await ask(served, client)
            served.sent.clear()
            for word in WORDS[1:]:
                source.push([word])
            assert served.sent == []
            source.push([], "length")
            found = texts(await read_until(client, b"0\r\n\r\n"))
            assert found == [TOKENIZER.decode([word]) for word in WORDS] + [""]
            assert [message["body"] for message in served.sent] == [b"data: [DONE]\n\n"]
            assert source.closed[0] == "length"

    serve(scenario)


def test_a_pipelined_request_is_answered_after_the_first():
    async def scenario(served: Served, client: socket.socket) -> None:
        first = await ask(served, client, GET + GET)
        first.push(WORDS[1:2], "stop")
        one = await read_until(client, b"0\r\n\r\n")
        await eventually(lambda: len(served.sources) == 2)
        served.sources[1].push(WORDS[2:3], "stop")
        two = await read_until(client, b"0\r\n\r\n")
        assert ["".join(texts(each)) for each in (one, two)] == [
            TOKENIZER.decode(WORDS[:2]),
            TOKENIZER.decode(WORDS[2:3]),
        ]

    serve(scenario)


def test_a_client_that_pauses_gets_everything_in_order():
    async def scenario(served: Served, client: socket.socket) -> None:
        source = await ask(served, client)
        for step in range(6000):  # far more than all buffers hold
            source.push([WORDS[step % len(WORDS)]])
        received = b""
        for burst in range(30):
            with suppress(BlockingIOError):
                received += client.recv(64 << 10)
            await asyncio.sleep(0.002)
            source.push([WORDS[burst % len(WORDS)]])
        source.push([], "stop")
        received += await read_until(client, b"0\r\n\r\n")
        tokens = [WORDS[0]]
        tokens += [WORDS[step % len(WORDS)] for step in range(6000)]
        tokens += [WORDS[burst % len(WORDS)] for burst in range(30)]
        found = texts(received)
        assert "".join(found) == TOKENIZER.decode(tokens)
        assert len(found) < len(tokens)  # what waited was joined

    serve(scenario)


def test_a_client_that_takes_nothing_is_given_up_and_its_request_cancelled():
    async def scenario(served: Served, client: socket.socket) -> None:
        source = await ask(served, client)
        for step in range(6000):
            source.push([WORDS[step % len(WORDS)]])
        await eventually(lambda: source.closed == ["abort"])

    serve(scenario, send_timeout_s=0.2)


def test_a_client_that_leaves_ends_the_stream():
    async def scenario(served: Served, client: socket.socket) -> None:
        source = await ask(served, client)
        client.close()
        await eventually(lambda: source.closed == ["abort"])

    serve(scenario)


def test_a_client_of_http_1_0_gets_its_answer_and_the_end_of_the_connection():
    async def scenario(served: Served, client: socket.socket) -> None:
        source = await ask(served, client, b"GET / HTTP/1.0\r\n\r\n")
        source.push(WORDS[1:2], "stop")
        response = await read_until(client, b"0\r\n\r\n")
        assert b"connection: close" in response.lower()
        assert "".join(texts(response)) == TOKENIZER.decode(WORDS[:2])
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""

    serve(scenario)
