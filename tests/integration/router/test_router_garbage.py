"""Requests leave no cycles: a pass of the garbage collector over all streams stops all of them."""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagewire.tests.support.aio import eventually
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import MODEL, LiveRouter, with_worker
from pagewire.tests.support.raw_http import RawClient

REQUESTS = 5
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat-stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "choices": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True}),
    "stop": ("/v1/completions", {"prompt": "Hello", "stop": "river", "stream": True}),
    "logprobs": ("/v1/completions", {"prompt": "Hello", "logprobs": 1, "prompt_logprobs": 1}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 5, "stream": True}),
    "responses": ("/v1/responses", {"input": "Hello", "stream": True}),
    "tokenize": ("/tokenize", {"prompt": "Hello"}),
    "embeddings": ("/v1/embeddings", {"input": ["Hello", "there"]}),
    "wrong": ("/v1/completions", {"prompt": 5}),
    "lost": ("/nowhere", {}),
}


@contextmanager
def garbage_of_ours() -> Iterator[Counter[str]]:
    """Count the garbage that a block leaves, by type; without what libraries leave."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = [type(each) for each in gc.garbage]
        found.update(kind.__qualname__ for kind in kinds if kind.__module__.startswith("pagewire."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def request(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps({"model": MODEL, **body}).encode()
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        len(raw),
        raw,
    )


async def answered(client: RawClient, sent: bytes, in_chunks: bool) -> None:
    await client.send(sent)
    if in_chunks:
        await client.until(b"0\r\n\r\n")
    else:
        await client.response()


@pytest.mark.parametrize("kind", BODIES)
def test_a_request_that_is_answered_leaves_none(redis_url, kind):
    path, body = BODIES[kind]

    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        async with RawClient(router.url) as client:
            sent, in_chunks = request(path, body), body.get("stream", kind == "embeddings")
            await answered(client, sent, in_chunks)  # what is made once is made now
            with garbage_of_ours() as found:
                for _ in range(REQUESTS):
                    await answered(client, sent, in_chunks)
                await asyncio.sleep(0.1)
        assert not found

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", ["a bug", None])
def test_a_request_that_fails_leaves_none(redis_url, stream, error):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        worker.error, worker.refuse = error, None if error else "overloaded"
        sent = request("/v1/completions", {"prompt": "Hello", "stream": stream})
        async with RawClient(router.url) as client:
            await answered(client, sent, in_chunks=False)
            with garbage_of_ours() as found:
                for _ in range(REQUESTS):
                    await answered(client, sent, in_chunks=False)
                await asyncio.sleep(0.1)
        assert not found

    with_worker(redis_url, scenario)


def test_a_client_that_leaves_in_mid_stream_leaves_none(redis_url):
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        async def visit() -> None:
            async with RawClient(router.url) as client:
                await client.send(request("/v1/completions", {"prompt": "Hello", "stream": True}))
                await client.until(b"\n\n")

        worker.answer = worker.answer * 50
        await visit()
        with garbage_of_ours() as found:
            for _ in range(REQUESTS):
                await visit()
            await eventually(lambda: worker.active == 0)
            await asyncio.sleep(0.1)
        assert not found

    with_worker(redis_url, scenario)
