"""The client of the router bench: one process that reads many streams and checks them afterwards.

While streams run, it keeps the data with their arrival times, counts events, and reports to the
stub workers which streams had an event. It parses the data only after the streams have ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import httptools
import httpx
import msgspec

from pagewire.loadtest.cluster import BenchError
from pagewire.services.cli.client.sse import EventParser

TOKEN_CHARS = 4  # characters of each token's text
MODEL = "m"
ENDLESS = 1 << 19  # tokens: the bench ends the stream long before
MAX_STREAMS = 1 << 16  # a credit is a stream's number in two bytes
RECEIVE_BYTES = 1 << 18
MOST_READY = 128  # sockets read between two readings of the clock
END_OF_RESPONSE = b"0\r\n\r\n"
PROMPT = "Which of these words belong together, and why do they? Answer at length."


@dataclass(frozen=True, slots=True)
class Script:
    """The tokens of streams: token i of stream s is number s + i of a cycle.

    Attributes:
        ids: the cycle.
        text: its text, `TOKEN_CHARS` characters a token.
    """

    ids: list[int]
    text: str

    def token_ids(self, stream: int, position: int, count: int) -> list[int]:
        """Return `count` tokens of a stream from a position on, at most a cycle."""
        start = (stream + position) % len(self.ids)
        ids = self.ids[start : start + count]
        return ids if len(ids) == count else ids + self.ids[: count - len(ids)]

    def content(self, stream: int, position: int, count: int) -> str:
        """Return the text of `count` tokens of a stream from a position on."""
        start = (stream + position) % len(self.ids)
        text = self.text * ((start + count) // len(self.ids) + 1)
        return text[start * TOKEN_CHARS : (start + count) * TOKEN_CHARS]


@dataclass(frozen=True, slots=True)
class SentTokens:
    """The tokens that the stub workers have sent, and when.

    Attributes:
        worker_of: stream -> its worker.
        steps: for each worker and message, the time and the number of tokens of each stream.
    """

    worker_of: dict[int, int]
    steps: list[list[tuple[float, int]]]


@dataclass(slots=True)
class Arrivals:
    """The tokens that arrived in a span of time.

    Attributes:
        events: number of events with text.
        tokens: number of their tokens.
        joined: number of events with more tokens than the stream's worker sent in one message.
        added: for each event, seconds since the worker sent the event's first token.
    """

    events: int = 0
    tokens: int = 0
    joined: int = 0
    added: array[float] = field(default_factory=lambda: array("d"))


class _Delta(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Stream:
    """A streamed response, which is checked at the end.

    Attributes:
        number: number of the stream, which the request has as its seed.
        times: arrival times, by the monotonic clock.
        data: what arrived at each of these times.
        line: beginning of a line whose end has not arrived.
        has_begun: whether an event has arrived.
    """

    number: int
    socket: socket.socket
    times: list[float] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    line: bytes = b""
    has_begun: bool = False

    def ask(self, port: int, max_tokens: int) -> None:
        """Send the request: a chat whose seed is the stream's number."""
        # Prompts begin differently, so that the router spreads them over the workers.
        content = f"{random.randrange(1 << 40)}: {PROMPT}"
        message = {"role": "user", "content": content}
        fields = {"model": MODEL, "messages": [message], "stream": True}
        body = msgspec.json.encode(fields | {"seed": self.number, "max_tokens": max_tokens})
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)

    def take(self, at: float, data: bytes) -> int:
        """Keep data; returns the number of events in the lines that are complete now.

        Args:
            at: arrival time.
            data: what has arrived; empty if the server has closed the connection.

        Raises:
            BenchError: the server has closed the connection.
        """
        if not data:
            raise BenchError(f"stream {self.number}: the server closed the connection early")
        self.times.append(at)
        self.data.append(data)
        if self.line:
            data = self.line + data
        if data.endswith(b"\n"):
            self.line = b""
        else:
            cut = data.rfind(b"\n") + 1
            data, self.line = data[:cut], data[cut:]
        return data.count(b"data: ")

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Yield arrival time and data of each event except [DONE].

        Raises:
            BenchError: the data are not a chunked response with status 200, or [DONE] is not last.
        """
        body, events, last = _Body(), EventParser(), b""
        response = httptools.HttpResponseParser(body)
        for at, data in zip(self.times, self.data, strict=True):
            try:
                response.feed_data(data)
            except httptools.HttpParserError as exc:
                raise BenchError(f"stream {self.number}: no response at {data[:99]!r}") from exc
            if body.parts and response.get_status_code() != httpx.codes.OK:
                raise BenchError(f"stream {self.number} was answered {b''.join(self.data)[:500]!r}")
            for last in events.feed(body.take()):
                if last != b"[DONE]":
                    yield at, last
        if last != b"[DONE]":
            raise BenchError(f"stream {self.number} does not end with [DONE]")


class _Body:
    """The parts of a response's body that have not been taken."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        """Keep a part; the parser calls this."""
        self.parts.append(data)

    def take(self) -> bytes:
        """Return what has come since the last call."""
        taken = b"".join(self.parts)
        self.parts.clear()
        return taken


def read(stream: Stream, script: Script, tokens: int) -> Iterator[tuple[float, int, int]]:
    """Yield the arrival time, the first token's position and the number of tokens of each event.

    Args:
        stream: the stream, with all of its data.
        script: the right tokens.
        tokens: number of tokens that the stream must have.

    Raises:
        BenchError: a token is wrong or missing.
    """
    position, number = 0, stream.number
    for at, data in stream.events():
        try:
            content = _decode_chunk(data).choices[0].delta.content
        except (msgspec.DecodeError, IndexError) as exc:
            raise BenchError(f"stream {number}: not a chunk of an answer: {data!r}") from exc
        if not content:
            continue
        count = -(-len(content) // TOKEN_CHARS)
        right = script.content(number, position, count)
        if content != right:
            raise BenchError(
                f"stream {number}: wrong text at token {position}: {content!r}, not {right!r}"
            )
        yield at, position, count
        position += count
    if position != tokens:
        raise BenchError(f"stream {number}: {position} of {tokens} tokens came")


class StreamsClient:
    """Reads streams and carries out the bench's commands.

    Args:
        commands: connection to the bench; a command is the name of a method without "do_", and its
            arguments.
        credits: file descriptors to each of which the number of a stream is written for each of its
            events.
        script: the streams' tokens.
    """

    def __init__(self, commands: Connection, credits: Sequence[int], script: Script) -> None:
        self._commands, self._credits, self._script = commands, credits, script
        self._epoll = select.epoll()
        self._open: dict[int, Stream] = {}
        self._streams: list[Stream] = []
        self._events = self._begun = self._port = 0
        self._next: int | None = None  # number of the next short answer; None if none is wanted

    def run(self) -> None:
        """Serve until the bench closes the connection."""
        self._epoll.register(self._commands.fileno(), select.EPOLLIN)
        while True:
            if self._poll():
                try:
                    name, *args = self._commands.recv()
                except EOFError:
                    return
                self._commands.send(getattr(self, f"do_{name}")(*args))

    def do_open(self, port: int, numbers: list[int]) -> None:
        """Open streams and wait until each has an event."""
        self._streams, self._events, self._begun, self._port = [], 0, 0, port
        for number in numbers:
            self._connect(number).ask(port, ENDLESS)
        while self._begun < len(numbers):
            self._poll()

    def do_count(self) -> int:
        """Return the number of events that have arrived."""
        return self._events

    def do_report(self, spans: list[tuple[float, float]], sent: SentTokens) -> list[Arrivals]:
        """Read all streams to their ends and check them; return what arrived in spans of time."""
        self._drain()
        times = [at for span in spans for at in span]
        intervals = [Arrivals() for _ in range(len(times) + 1)]  # between any two of the times
        tokens = [[step for step in steps for _ in range(step[1])] for steps in sent.steps]
        for stream in self._streams:
            sent_at = tokens[sent.worker_of[stream.number]]
            for at, position, count in read(stream, self._script, len(sent_at)):
                arrivals = intervals[bisect_right(times, at)]
                arrivals.events += 1
                arrivals.tokens += count
                arrivals.joined += count > sent_at[position][1]
                arrivals.added.append(at - sent_at[position][0])
        return intervals[1::2]

    def do_template(self) -> tuple[bytes, bytes]:
        """Return the bytes of an event before and after its text."""
        event = [data for _, data in self._streams[0].events()][1]  # the first one has a role
        content = _decode_chunk(event).choices[0].delta.content.encode()
        head, _, tail = event.partition(content)
        return b"data: " + head, tail + b"\n\n"

    def do_ask(self, port: int, connections: int) -> None:
        """Ask for answers of one token on each connection, again and again until `do_answers`."""
        self._streams, self._port, self._next = [], port, random.randrange(1 << 40)
        for _ in range(connections):
            self._connect(self._take_number()).ask(port, 1)

    def do_answers(self, start: float, end: float) -> int:
        """Wait for the last answers, check all, and return how many ended in a span of time."""
        self._next = None
        self._drain()
        times = [at for stream in self._streams for at, _, _ in read(stream, self._script, 1)]
        return sum(start <= at < end for at in times)

    def _drain(self) -> None:
        while self._open:
            self._poll()

    def _take_number(self) -> int:
        number = self._next or 0
        self._next = number + 1
        return number

    def _connect(self, number: int) -> Stream:
        stream = Stream(number, socket.create_connection(("127.0.0.1", self._port)))
        stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._epoll.register(stream.socket.fileno(), select.EPOLLIN)
        self._add(stream)
        return stream

    def _add(self, stream: Stream) -> None:
        self._streams.append(stream)
        self._open[stream.socket.fileno()] = stream

    def _poll(self) -> bool:
        """Read what has arrived; returns whether the bench has a command."""
        ready = self._epoll.poll(maxevents=MOST_READY)
        now = time.monotonic()
        has_command, credits = False, array("H")
        for fd, _ in ready:
            stream = self._open.get(fd)
            if stream is None:
                has_command = True
                continue
            data = stream.socket.recv(RECEIVE_BYTES)
            count = stream.take(now, data)
            self._events += count
            credits.extend([stream.number % MAX_STREAMS] * count)
            if count and not stream.has_begun:
                stream.has_begun = True
                self._begun += 1
            if data.endswith(END_OF_RESPONSE):
                self._end(fd, stream)
        if credits:
            for fd in self._credits:
                os.write(fd, credits)
        return has_command

    def _end(self, fd: int, stream: Stream) -> None:
        if self._next is not None:
            again = Stream(self._take_number(), stream.socket)
            self._add(again)
            again.ask(self._port, 1)
        else:
            self._epoll.unregister(fd)
            self._open.pop(fd).socket.close()


def run_client(commands: Connection, credits: Sequence[Connection], script: Script) -> None:
    """Run the client's process until the bench closes the connection."""
    with contextlib.suppress(BrokenPipeError):  # the bench has ended meanwhile
        try:
            StreamsClient(commands, [credit.fileno() for credit in credits], script).run()
        except BenchError as exc:
            commands.send(exc)
        except OSError as exc:
            commands.send(BenchError(f"the client cannot continue: {exc}"))
