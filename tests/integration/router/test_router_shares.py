"""How much of two routers a key may hold, and what is left for others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.shared.http.proxy_header import SIGNATURE
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import (
    ANSWER,
    MODEL,
    SECRET,
    LiveRouter,
    live_router,
    with_worker,
)
from pagewire.tests.support.raw_http import RawClient, post

ALICE, BOB = {"x-api-key": "key-of-alice"}, {"x-api-key": "key-of-bob-1"}
Routers = tuple[LiveRouter, LiveRouter]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("alice: key-of-alice\nbob: key-of-bob-1\n")
    return file


@asynccontextmanager
async def two_routers(
    url: str, worker: FakeDecodeWorker, **settings: Any
) -> AsyncIterator[tuple[Routers, AsyncExitStack]]:
    """Run two routers that know each other; the stack ends the second one."""
    async with worker, live_router(url, router_id="one", **settings) as one:
        stack = AsyncExitStack()
        two = await stack.enter_async_context(live_router(url, router_id="two", **settings))
        try:
            for router in (one, two):
                await router.ready()
                await eventually(lambda router=router: router.service.members.num_routers == 2)
            yield (one, two), stack
        finally:
            await stack.aclose()
        for router in (one, two):
            assert router.service.dispatcher.admission.num_sequences == 0


def with_two(
    url: str,
    scenario: Callable[[Routers, AsyncExitStack, FakeDecodeWorker], Awaitable[None]],
    **settings: Any,
) -> None:
    async def main() -> None:
        worker = FakeDecodeWorker(url, SECRET, answer=ANSWER)
        async with two_routers(url, worker, **settings) as (routers, second):
            await scenario(routers, second, worker)

    run_async(main(), timeout=100)


async def ask(
    router: LiveRouter, key: dict[str, str], prompts: int = 1, **body: Any
) -> httpx.Response:
    asked = {"model": MODEL, "prompt": ["Hi"] * prompts, "max_tokens": 3, **body}
    return await router.http.post("/v1/completions", json=asked, headers=key)


def owners(worker: FakeDecodeWorker) -> list[str | None]:
    return [message.spec.owner for message in worker.generated]


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_that_fills_all_routers_keeps_no_other_key_out(
    redis_url: str, keys: Path, stream: bool
) -> None:
    async def scenario(routers: Routers, _: AsyncExitStack, worker: FakeDecodeWorker) -> None:
        worker.hold.clear()
        flood = [
            asyncio.create_task(ask(router, ALICE, 2, n=4, stream=stream))
            for router in routers
            for _ in range(4)
        ]
        await eventually(lambda: len(worker.generated) == 64)
        for router in routers:
            refused = await ask(router, ALICE)
            assert refused.status_code == 429, refused.text
            assert "overloaded" in refused.json()["error"]["message"]
        chats = [
            asyncio.create_task(ask(router, BOB, stream=stream))
            for router in routers
            for _ in range(8)
        ]
        await eventually(lambda: owners(worker)[64:] == ["bob"] * 16)
        worker.hold.set()
        assert {response.status_code for response in await asyncio.gather(*chats)} == {200}
        assert {response.status_code for response in await asyncio.gather(*flood)} == {200}
        assert (await ask(routers[0], ALICE)).status_code == 200
        sample = 'pagewire_key_refusals_total{key="alice",limit="shared"}'
        assert await routers[0].metric(sample) == 1

    with_two(redis_url, scenario, api_key_file=keys, max_queue=32)


def test_a_keys_limit_is_divided_among_the_routers_that_live(redis_url: str, keys: Path) -> None:
    async def scenario(routers: Routers, second: AsyncExitStack, worker: FakeDecodeWorker) -> None:
        one, _ = routers
        worker.hold.clear()
        flood = [asyncio.create_task(ask(router, ALICE, 3)) for router in routers]
        await eventually(lambda: len(worker.generated) == 6)
        for router in routers:
            refused = await ask(router, ALICE)
            assert refused.status_code == 429
            error = refused.json()["error"]
            assert "as many as max_queue_per_key allows" in error["message"]
            assert error["code"] == "rate_limit_exceeded"
            assert int(refused.headers["Retry-After"]) >= 1
        message = await one.http.post("/v1/messages", json={}, headers=ALICE)
        assert "max_queue_per_key" in message.json()["error"]["message"]
        assert (await ask(one, ALICE, 2, n=2)).status_code == 429  # before its body is read
        bobs = await ask(one, BOB, 2, n=2)
        assert (bobs.status_code, bobs.json()["error"]["param"]) == (400, "n")
        sample = 'pagewire_key_refusals_total{key="alice",limit="max_queue_per_key"}'
        assert await one.metric(sample) == 3
        worker.hold.set()
        assert [(await each).status_code for each in flood] == [200, 200]
        await second.aclose()
        await eventually(lambda: one.service.members.num_routers == 1)
        assert (await ask(one, ALICE, 3, n=2)).status_code == 200
        assert (await ask(one, ALICE, 7)).status_code == 400

    with_two(redis_url, scenario, api_key_file=keys, max_queue_per_key=6)


def test_whoever_leaves_or_fails_gives_back_what_it_held(redis_url: str, keys: Path) -> None:
    async def scenario(routers: Routers, _: AsyncExitStack, worker: FakeDecodeWorker) -> None:
        router = routers[0]

        async def is_free() -> None:
            deadline = asyncio.get_running_loop().time() + 20
            while (answer := await ask(router, ALICE, 4)).status_code == 429:
                assert asyncio.get_running_loop().time() < deadline
            assert answer.status_code == 200

        for body in ({}, {"stream": True}, {"ignored": "x" * 20_000}):
            worker.hold.clear()
            raw = json.dumps({"model": MODEL, "prompt": "Hi", "n": 4, **body}).encode()
            async with RawClient(router.url) as client:
                before = len(worker.generated)
                await client.send(post(raw, "x-api-key: key-of-alice"))
                await eventually(lambda before=before: len(worker.generated) == before + 4)
                assert (await ask(router, ALICE)).status_code == 429
            worker.hold.set()
            await is_free()
        async with RawClient(router.url) as client:  # it leaves while it sends its body
            await client.send(post(b"{", "x-api-key: key-of-alice", length=1 << 20))
        worker.error = "broken"
        assert (await ask(router, ALICE, 4)).status_code == 500
        worker.error, worker.refuse = None, "overloaded"
        assert (await ask(router, ALICE, 4)).status_code == 429
        worker.refuse = "invalid"
        assert (await ask(router, ALICE, 4)).status_code == 400
        worker.refuse = None
        assert (await ask(router, ALICE, prompts=0)).status_code == 400
        await is_free()

    with_two(redis_url, scenario, api_key_file=keys, max_queue_per_key=8)


def proxied(address: str) -> bytes:
    """Return a PROXY protocol header of a client at this address."""
    source, target = (bytes(map(int, each.split("."))) for each in (address, "10.0.0.1"))
    return SIGNATURE + b"\x21\x11\x00\x0c" + source + target + b"\x10\x00\x1f\x40"


def test_where_there_are_no_keys_addresses_behind_the_gateway_are_owners(redis_url: str) -> None:
    async def scenario(routers: Routers, _: AsyncExitStack, worker: FakeDecodeWorker) -> None:
        router = routers[0]
        raw = post(json.dumps({"model": MODEL, "prompt": "Hi", "n": 2}).encode())
        worker.hold.clear()
        async with AsyncExitStack() as stack:

            async def send(address: str) -> RawClient:
                client = await stack.enter_async_context(RawClient(router.url))
                await client.send(proxied(address) + raw)
                return client

            flood = [await send("192.0.2.1") for _ in range(4)]
            await eventually(lambda: len(worker.generated) == 8)
            status, _, body = await (await send("192.0.2.1")).response()
            assert status == 429, body
            chat = await send("192.0.2.2")
            await eventually(lambda: owners(worker)[8:] == ["192.0.2.2"] * 2)
            worker.hold.set()
            for client in (*flood, chat):
                assert (await client.response())[0] == 200

    with_two(redis_url, scenario, max_queue=8, trust_proxy_protocol=True)


def test_a_key_with_nearly_all_connections_leaves_some_to_others(
    redis_url: str, keys: Path
) -> None:
    async def scenario(router: LiveRouter, worker: FakeDecodeWorker) -> None:
        raw = json.dumps({"model": MODEL, "prompt": "Hi", "stream": True}).encode()
        worker.hold.clear()
        async with AsyncExitStack() as stack:
            for _ in range(48):
                client = await stack.enter_async_context(RawClient(router.url))
                await client.send(post(raw, "x-api-key: key-of-alice"))
            await eventually(lambda: len(worker.generated) == 35)
            chats = [asyncio.create_task(ask(router, BOB)) for _ in range(4)]
            await eventually(lambda: owners(worker)[35:] == ["bob"] * 4)
            refused = await ask(router, ALICE)
            assert (refused.status_code, "Retry-After" in refused.headers) == (429, True)
            assert (await router.http.get("/health")).status_code == 200
            worker.hold.set()
            assert {each.status_code for each in await asyncio.gather(*chats)} == {200}
        await eventually(lambda: worker.active == 0)
        assert (await ask(router, ALICE)).status_code == 200

    with_worker(redis_url, scenario, api_key_file=keys, max_connections=40)
