"""The processes of the router bench that send the tokens, one for each stub worker.

Stub decode workers speak the control protocol to the router: real records, sockets and messages, no
engine. The relay and nginx get prepared events from sources with the same streams and steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from abc import ABC, abstractmethod
from array import array
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

from pagewire.loadtest.bench.router_client import MODEL, Script
from pagewire.loadtest.bench.router_relay import DONE, ENTRY, HOST, HttpProtocol, chunk, listen
from pagewire.shared.cluster.redis_client import connect_redis
from pagewire.shared.cluster.registry import RecordPublisher, Registry, WorkerLoad, WorkerRecord
from pagewire.shared.control.channel import ClusterKeys, ControlServer
from pagewire.shared.control.protocol import (
    PROTOCOL_VERSION,
    ControlMessage,
    Generate,
    Timings,
    TokenBatch,
    TokenOutput,
)
from pagewire.shared.kv.model_identity import ModelIdentity

HEARTBEAT_S, LEASE_S = 1.0, 5.0
MAX_MODEL_LEN = 1 << 20
BLOCKS = 1 << 20
CREDIT_BYTES = 1 << 16
IDENTITY = ModelIdentity(fingerprint="stub", dtype="bfloat16", kv_format="bfloat16", block_size=16)

Template = tuple[bytes, bytes]  # an event's bytes before and after its text


class Source(ABC):
    """The streams of one stub worker.

    Attributes:
        streams: number of a stream -> destination of its tokens.
        position: number of tokens sent to each stream.
        steps: for each message, the time and the number of tokens of each stream.
        unread: number of events that the client has not received yet.

    Args:
        script: the streams' tokens.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.reset()

    def reset(self) -> None:
        """Forget all streams and what was sent to them."""
        self.streams: dict[int, Any] = {}
        self.position = self.unread = 0
        self.steps: list[tuple[float, int]] = []

    def open(self, number: int, where: Any) -> None:
        """Add a stream and the destination of its tokens."""
        self.streams[number] = where

    def step(self, tokens: int, is_last: bool = False) -> None:
        """Send each stream its next tokens."""
        if self.streams:
            self.steps.append((self.send(tokens, is_last), tokens))
            self.position += tokens
            self.unread += len(self.streams)

    @abstractmethod
    def send(self, tokens: int, is_last: bool) -> float:
        """Send a step's tokens; return the time, by the monotonic clock."""


class StubWorker(Source):
    """A decode worker as a router sees it: record, control channel, messages; no engine."""

    async def start(self, name: str, secret: str, redis_url: str, stack: AsyncExitStack) -> None:
        """Listen, and publish a worker record until the stack is closed."""
        server = self._server = ControlServer(
            HOST,
            0,
            ClusterKeys.derive(secret),
            name,
            1,
            self._on_message,
            lambda peer: None,
            lease_s=LEASE_S,
            heartbeat_s=HEARTBEAT_S,
        )
        endpoint = await server.start()
        stack.push_async_callback(server.close)
        redis = await connect_redis(redis_url)
        stack.push_async_callback(redis.aclose)
        record = WorkerRecord(
            worker_id=name,
            role="decode",
            epoch=1,
            endpoint=endpoint,
            metrics_endpoint=f"http://{HOST}:9",
            model=MODEL,
            model_identity=IDENTITY,
            max_model_len=MAX_MODEL_LEN,
            kv_transports=["zmq"],
            protocol=PROTOCOL_VERSION,
            load=WorkerLoad(free_blocks=BLOCKS, total_blocks=BLOCKS),
        )
        registry = Registry(redis, secret, LEASE_S)
        publisher = RecordPublisher(registry, lambda: record, HEARTBEAT_S)
        await publisher.start()
        stack.push_async_callback(publisher.close)

    def send(self, tokens: int, is_last: bool) -> float:
        """Send each router one message, as a decode worker does."""
        batches: dict[str, list[TokenOutput]] = {}
        for number, (peer, request_id) in self.streams.items():
            ids = self.script.token_ids(number, self.position, tokens)
            if is_last or not self.position:
                output = self._first_or_last_output(request_id, ids, "stop" if is_last else None)
            else:
                output = TokenOutput(request_id=request_id, token_ids=ids)
            batches.setdefault(peer, []).append(output)
        now = time.monotonic()
        for peer, outputs in batches.items():
            self._server.post(peer, TokenBatch(outputs=outputs))
        return now

    def _first_or_last_output(
        self, request_id: str, ids: list[int], reason: Literal["stop", "length"] | None
    ) -> TokenOutput:
        """Return a stream's first or last output, which has more fields than the others."""
        return TokenOutput(
            request_id=request_id,
            token_ids=ids,
            finish_reason=reason,
            cached_tokens=None if self.position else 0,
            timings=None if reason is None else Timings(),
        )

    def _on_message(self, peer: str, message: ControlMessage) -> None:
        if not isinstance(message, Generate):
            return
        number = message.spec.seed or 0
        if message.spec.max_tokens > 1:
            self.open(number, (peer, message.request_id))
        else:  # a short answer, at once
            ids = self.script.token_ids(number, 0, 1)
            output = self._first_or_last_output(message.request_id, ids, "length")
            self._server.post(peer, TokenBatch(outputs=[output]))


class EventSource(Source):
    """Sends prepared events: the bytes that the router sends for such tokens."""

    def set_template(self, template: Template) -> None:
        """Set the events' bytes before and after their text."""
        self._template = template
        self._ready: dict[int, list[bytes]] = {}

    def event(self, number: int, tokens: int) -> bytes:
        """Return the next server-sent event of a stream."""
        cycle = len(self.script.ids)
        if tokens not in self._ready:
            texts = [self.script.content(start, 0, tokens) for start in range(cycle)]
            self._ready[tokens] = [text.encode().join(self._template) for text in texts]
        return self._ready[tokens][(number + self.position) % cycle]


class RelaySource(EventSource, asyncio.Protocol):
    """Sends the relay one message per step: for each stream an `ENTRY` and its event."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection to the relay."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Add streams: the relay sends their numbers, two bytes each."""
        for number in array("H", data):
            self.open(number, None)

    def send(self, tokens: int, is_last: bool) -> float:
        """Send the step's events of all streams to the relay, as one message."""
        parts = []
        for number in self.streams:
            event = self.event(number, tokens)
            parts += [ENTRY.pack(number, len(event)), event]
            if is_last:
                parts += [ENTRY.pack(number, len(DONE)), DONE, ENTRY.pack(number, 0)]
        message = b"".join(parts)
        now = time.monotonic()
        self._transport.write(message)
        return now


class UpstreamSource(EventSource):
    """The streams of an HTTP server, each a response."""

    def send(self, tokens: int, is_last: bool) -> float:
        """Write a step's events, each to its connection."""
        now = time.monotonic()
        for number, transport in self.streams.items():
            transport.write(chunk(self.event(number, tokens)))
            if is_last:
                transport.write(chunk(DONE) + chunk(b""))
        return now


class Stub:
    """A stub worker and its counterparts for the baselines, in one process, and how fast they send.

    At full speed a source sends its next step when the clients have received all events of the
    last. Kinds of sources: "workers" for routers, "relay", "nginx".

    Args:
        commands: connection to the bench; a command is the name of a method without "do_", and its
            arguments.
        credits: non-blocking file descriptor from which the number of a stream is read for each
            event that a client has received, of this worker's streams and of others'.
        script: the streams' tokens.
    """

    def __init__(self, commands: Connection, credits: int, script: Script) -> None:
        self._commands, self._credits = commands, credits
        self.worker = StubWorker(script)
        self._relay, self._upstream = RelaySource(script), UpstreamSource(script)
        self._kinds: dict[str, Source] = {
            "workers": self.worker,
            "relay": self._relay,
            "nginx": self._upstream,
        }
        self._source: Source = self.worker
        self._tokens = 1
        self._period: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Serve until the bench closes the connection."""
        commands: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()
        self._loop.add_reader(self._credits, self._on_credits)
        self._loop.add_reader(self._commands.fileno(), self._on_command, commands)
        while (command := await commands.get()) is not None:
            name, *args = command
            result = await getattr(self, f"do_{name}")(*args)
            with contextlib.suppress(BrokenPipeError):  # the bench has been interrupted meanwhile
                self._commands.send(result)
        self._loop.remove_reader(self._credits)

    async def do_surround(self, relay_port: int) -> int:
        """Connect to the relay, and listen as an upstream of nginx; returns the port."""
        await self._loop.create_connection(lambda: self._relay, HOST, relay_port)
        _, port = await listen(partial(HttpProtocol, self._upstream.open))
        return port

    async def do_expect(self, kind: str, template: Template) -> None:
        """Prepare for streams.

        Args:
            kind: kind of the source that sends them.
            template: bytes of an event before and after its text.
        """
        self._stop_timer()
        with contextlib.suppress(BlockingIOError):  # credits of the last streams' ends
            while os.read(self._credits, CREDIT_BYTES):
                pass
        self._source = self._kinds[kind]
        self._source.reset()
        if isinstance(self._source, EventSource):
            self._source.set_template(template)
        self._tokens, self._period = 1, None

    async def do_count(self) -> int:
        """Return the number of streams that are open."""
        return len(self._source.streams)

    async def do_begin(self) -> None:
        """Send the first step; no more streams will be opened."""
        self._source.step(self._tokens)

    async def do_pace(self, tokens: int, period: float | None, delay: float) -> None:
        """Change the tokens per step, and the speed.

        Args:
            tokens: number of tokens of a stream in a step.
            period: seconds from step to step; None is full speed.
            delay: seconds to the next step, unless at full speed.
        """
        self._stop_timer()
        self._tokens, self._period = tokens, period
        if period is None:
            self._step_if_read()
        else:
            self._step_at(self._loop.time() + delay)

    async def do_end(self) -> tuple[list[int], list[tuple[float, int]]]:
        """End all streams by a last step; returns their numbers and the steps that were sent."""
        self._stop_timer()
        self._period = 0.0
        self._source.step(self._tokens, is_last=True)
        return list(self._source.streams), self._source.steps

    def _on_credits(self) -> None:
        source = self._source
        numbers = array("H", os.read(self._credits, CREDIT_BYTES))
        source.unread -= sum(map(source.streams.__contains__, numbers))
        self._step_if_read()

    def _step_if_read(self) -> None:
        if self._period is None and self._source.steps and not self._source.unread:
            self._source.step(self._tokens)

    def _step_at(self, when: float) -> None:
        self._timer = self._loop.call_at(when, self._on_time, when)

    def _on_time(self, when: float) -> None:
        self._source.step(self._tokens)
        if self._period:
            self._step_at(max(when + self._period, self._loop.time()))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_command(self, commands: asyncio.Queue[tuple[Any, ...] | None]) -> None:
        try:
            commands.put_nowait(self._commands.recv())
        except EOFError:
            self._loop.remove_reader(self._commands.fileno())
            commands.put_nowait(None)


def run_stub(
    commands: Connection,
    credits: Connection,
    script: Script,
    name: str,
    secret: str,
    redis_url: str,
) -> None:
    """Run the process of a stub worker."""
    os.set_blocking(credits.fileno(), False)

    async def main() -> None:
        stub = Stub(commands, credits.fileno(), script)
        async with AsyncExitStack() as stack:
            await stub.worker.start(name, secret, redis_url, stack)
            await stub.run()

    asyncio.run(main())
