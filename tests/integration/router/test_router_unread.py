"""Clients that do not read large responses: what these take of a router's memory is bounded."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pagewire.services.router.http.connection.http_io import UNCOUNTED_BYTES
from pagewire.services.router.http.server.unread_responses import PART_BYTES
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import TOKENIZER, LiveRouter, with_worker
from pagewire.tests.support.raw_http import RawClient

ALICE, BOB = "key-of-alice", "key-of-bob-1"
(LONG,) = TOKENIZER.encode("\n" + " " * 20, add_special_tokens=False)
LARGE = json.dumps({"tokens": [LONG] * 1_000_000}).encode()  # its answer has 22 MB
LIMIT = 60 << 20


def request(key: str, path: str = "/detokenize", body: bytes = LARGE) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"alice: {ALICE}\nbob: {BOB}\n")
    return file


def test_responses_that_nobody_reads_are_bounded_for_each_key(redis_url: str, keys: Path) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        bodies = router.service.bodies
        bodies.limit = LIMIT
        async with AsyncExitStack() as stack:

            async def send(key: str) -> RawClient:
                client = await stack.enter_async_context(RawClient(router.url))
                await client.send(request(key))
                return client

            unread = []
            for count in (1, 2, 3):
                unread.append(await send(ALICE))
                await eventually(lambda count=count: bodies.held > count * 20_000_000)
            status, _, body = await (await send(ALICE)).response()
            assert status == 429, body[:200]
            assert b"overloaded" in body
            bob = await send(BOB)
            await eventually(lambda: bodies.held > 80_000_000)
            for client in (*unread, bob):
                status, _, body = await client.response()
                assert (status, len(json.loads(body)["prompt"])) == (200, 21_000_000)
            await eventually(lambda: bodies.held == 0)
            await send(ALICE)
            await eventually(lambda: bodies.held > 20_000_000)
        await eventually(lambda: bodies.held == 0)  # it has left

    with_worker(redis_url, scenario, api_key_file=keys)


def test_of_several_responses_larger_than_the_bound_one_is_sent(redis_url: str) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        bodies = router.service.bodies
        async with RawClient(router.url) as client, RawClient(router.url) as late:
            for each in (client, late):
                await each.send(request("", body=LARGE)[:-1])
            await eventually(lambda: bodies.held > 2 * (len(LARGE) - UNCOUNTED_BYTES) - 10)
            bodies.limit = 16_000_000
            await client.send(LARGE[-1:])
            await eventually(lambda: bodies.held > 20_000_000)
            await late.send(LARGE[-1:])
            status, _, body = await late.response()
            assert (status, b"overloaded" in body) == (429, True)
            status, _, body = await client.response()
            assert (status, len(json.loads(body)["prompt"])) == (200, 21_000_000)
        await eventually(lambda: bodies.held == 0)

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("more", [-1, 0, 1, PART_BYTES, PART_BYTES + 1])
def test_a_response_of_any_length_is_whole(redis_url: str, more: int) -> None:
    async def scenario(router: LiveRouter, _worker: FakeDecodeWorker) -> None:
        size = UNCOUNTED_BYTES + more - len('{"prompt":""}')
        (letter,) = TOKENIZER.encode("a", add_special_tokens=False)
        async with RawClient(router.url) as client:
            for _ in range(2):  # the connection stays
                body = json.dumps({"tokens": [letter] * size}).encode()
                await client.send(request("", body=body))
                status, headers, answer = await client.response()
                assert (status, json.loads(answer)) == (200, {"prompt": "a" * size})
                assert int(headers["content-length"]) == UNCOUNTED_BYTES + more
        await asyncio.sleep(0)
        assert router.service.bodies.held == 0

    with_worker(redis_url, scenario)
