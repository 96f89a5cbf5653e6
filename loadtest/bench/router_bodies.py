"""The effect of large bodies on other clients of a router: gaps of streams, and event loop lag.

    python -P -m pagewire.loadtest.bench.router_bodies --streams 64 --seconds 5

A stub worker sends each stream a token every 14 ms. Meanwhile one client posts the same large body
again and again, and another one asks for `/v1/models`, 5 ms after each answer: the longest time to
an answer shows how long the event loop was busy. Prints a line for each kind of body; the first one
is without a body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from pagewire.loadtest.bench.child import BenchProcess
from pagewire.loadtest.bench.clusters import run_bench
from pagewire.loadtest.bench.router_client import ENDLESS, MODEL, Script
from pagewire.loadtest.bench.router_relay import HOST
from pagewire.loadtest.bench.router_start import (
    START_TIMEOUT_S,
    start_redis,
    start_router,
    write_model,
)
from pagewire.loadtest.bench.router_stubs import StubWorker
from pagewire.loadtest.bench.tables import emit
from pagewire.services.cli.bench.stats import percentile

NAME = "decode-0"
STEP_S = 0.014
ASK_S = 0.005
ANSWER_TIMEOUT_S = 120.0
TOKEN = 300
FIRST_TOKENS = 50  # tokens of each stream before anything is measured


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield name, path and bytes of each large body."""
    short: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
    part = {"type": "text", "text": "a"}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": [part] * 300_000}]}
    unknown = {f"unknown{number:06}": number for number in range(500_000)}
    lists = {"unknown": [{"a": [1, 2, {"b": "c"}]}] * 480_000}
    for name, path, body in (
        ("unknown fields", "completions", short | unknown),
        ("an unknown field of lists", "completions", short | lists),
        ("text parts", "chat/completions", chat),
        ("stop token ids", "completions", short | {"stop_token_ids": [1] * 3_000_000}),
        ("a text", "completions", short | {"prompt": "word " * 2_600_000}),
    ):
        yield name, f"/v1/{path}", json.dumps(body).encode()


async def send_tokens(redis_url: str, secret: str) -> None:
    """Run a stub worker that sends each stream one token per step, forever."""
    worker = StubWorker(Script([TOKEN], ""))
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        await worker.start(NAME, secret, redis_url, stack)
        due = loop.time()
        while True:
            due = max(due + STEP_S, loop.time())
            await asyncio.sleep(due - loop.time())
            worker.step(1)


def run_worker(until: Connection, redis_url: str, secret: str) -> None:
    """Run the stub worker's process until the bench ends."""
    threading.Thread(target=lambda: (until.poll(None), os._exit(0)), daemon=True).start()
    asyncio.run(send_tokens(redis_url, secret))


class Stream(asyncio.Protocol):
    """A client of one stream, which records arrival times of tokens.

    Attributes:
        times: arrival times of data, by the monotonic clock.
        runs: set when the first tokens have arrived.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.times: list[float] = []
        self.runs = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        """Send the request for an endless stream."""
        fields = {"model": MODEL, "prompt": "Hi", "max_tokens": ENDLESS, "stream": True}
        fields["seed"] = self._number  # stub workers identify streams by it
        body = json.dumps(fields).encode()
        self.transport: asyncio.Transport = transport
        self.transport.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        """Record when a part of the stream arrived."""
        self.times.append(time.monotonic())
        if len(self.times) == FIRST_TOKENS:
            self.runs.set()


@dataclass(slots=True)
class Posted:
    """Answers to one body that was posted again and again.

    Attributes:
        seconds: time to each answer, in seconds.
        status: HTTP status of the last answer.
    """

    seconds: list[float] = field(default_factory=list)
    status: int = 0


async def post(url: str, body: bytes, posted: Posted, ended: asyncio.Event) -> None:
    """Post a body again and again until the end; each time from a thread, as it takes long."""
    headers = {"Content-Type": "application/json"}
    with httpx.Client(headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
        while not ended.is_set():
            start = time.monotonic()
            response = await asyncio.to_thread(client.post, url, content=body)
            posted.status = response.status_code
            posted.seconds.append(time.monotonic() - start)


async def ask(port: int, seconds: float) -> list[float]:
    """Return how long answers to a small request take, in seconds."""
    answers = []
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", trust_env=False) as client:
        await client.get("/v1/models")
        end = time.monotonic() + seconds
        while (start := time.monotonic()) < end:
            await client.get("/v1/models")
            answers.append(time.monotonic() - start)
            await asyncio.sleep(ASK_S)
    return answers


async def measure(port: int, options: argparse.Namespace) -> None:
    """Print a line for each kind of body."""
    loop = asyncio.get_running_loop()
    streams = [Stream(number) for number in range(options.streams)]
    for stream in streams:
        await loop.create_connection(lambda it=stream: it, HOST, port)  # type: ignore[misc]
    async with asyncio.timeout(START_TIMEOUT_S):
        for stream in streams:
            await stream.runs.wait()
    for name, path, body in (("none", "", b""), *bodies()):
        posted, ended = Posted(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            if body:
                group.create_task(post(f"http://{HOST}:{port}{path}", body, posted, ended))
                await asyncio.sleep(options.settle)  # the first one may start a process
            start = time.monotonic()
            waits = await ask(port, options.seconds)
            end = time.monotonic()
            ended.set()
        gaps = [
            (after - before) * 1e3
            for stream in streams
            for before, after in pairwise(stream.times)
            if start <= before and after <= end
        ]
        emit(
            "router_bodies",
            body=name,
            mbytes=len(body) / 1e6,
            status=posted.status,
            posted=len(posted.seconds),
            slowest_s=max(posted.seconds, default=0.0),
            gap_p50_ms=percentile(gaps, 50),
            gap_p99_ms=percentile(gaps, 99),
            gap_max_ms=max(gaps),
            lag_p99_ms=percentile(waits, 99) * 1e3,
            lag_max_ms=max(waits) * 1e3,
        )
    for stream in streams:
        stream.transport.abort()


def run(options: argparse.Namespace) -> None:
    """Start everything and measure.

    Raises:
        BenchError: something does not start.
    """
    secret = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="pw-") as name, ExitStack() as stack:
        folder = Path(name)
        redis_url = start_redis(folder, stack)
        stack.callback(BenchProcess(run_worker, redis_url, secret).close)
        write_model(folder / "model")
        port, _ = start_router(stack, folder / "router.log", redis_url, secret, [NAME])
        asyncio.run(measure(port, options))


def main() -> int:
    """Measure gaps and event loop lag with each kind of body."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds for each kind of body")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before measurements")
    options = parser.parse_args()
    return run_bench(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
