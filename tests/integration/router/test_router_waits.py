"""Requests that come while the only decode worker is away."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from pagewire.services.router.dispatch import dispatcher as dispatch
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import (
    ANSWER,
    MODEL,
    SECRET,
    TEXT,
    LiveRouter,
    live_router,
    with_worker,
)
from pagewire.tests.support.sse import events_of


@asynccontextmanager
async def router_that_lost_its_worker(
    redis_url: str, **settings: Any
) -> AsyncIterator[tuple[LiveRouter, Callable[[], Awaitable[None]]]]:
    """Yield a router whose only worker is gone, its record too, and what brings it back."""
    async with live_router(redis_url, **settings) as router, AsyncExitStack() as stack:

        async def start() -> None:
            epoch = time.time_ns()
            worker = FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, epoch=epoch)
            await stack.enter_async_context(worker)

        await start()
        await router.ready()
        await stack.aclose()
        await router.ready(0)
        await eventually(lambda: not router.service.members.directory.workers())
        yield router, start


@pytest.mark.parametrize("how", ["restarts", "drains and restarts"])
def test_they_wait_until_it_is_back(redis_url, how):
    async def scenario(router: LiveRouter, old: FakeDecodeWorker) -> None:
        if how == "restarts":
            await old.die()
            await old.stop_renewing()
        else:
            old.put_record(state="draining")
            old.refuse = "draining"
        await router.ready(0)
        asked = [
            asyncio.create_task(router.complete(prompt="Hi", max_tokens=99, stream=stream))
            for stream in (False, True)
        ]
        await asyncio.sleep(1)
        assert not any(task.done() for task in asked)
        assert (await router.http.get("/ready")).status_code == 503
        waiting = f'vllm:num_requests_waiting{{model_name="{MODEL}"}}'
        assert await router.metric(waiting) == 2
        await old.__aexit__()
        async with FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, epoch=2):
            whole, stream = await asyncio.gather(*asked)
        assert whole.json()["choices"][0]["text"] == TEXT
        assert stream.status_code == 200
        events = events_of([stream.content])
        assert "".join(event["choices"][0]["text"] for event in events) == TEXT

    with_worker(redis_url, scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wait_s", "settings"),
    [(0.5, {}), (30.0, {"request_timeout_s": 0.5})],
    ids=["bound", "setting"],
)
def test_if_it_stays_away_they_end_with_a_503(redis_url, monkeypatch, stream, wait_s, settings):
    monkeypatch.setattr(dispatch, "WORKER_WAIT_S", wait_s)

    async def scenario() -> None:
        async with router_that_lost_its_worker(redis_url, **settings) as (router, _):
            start = time.monotonic()
            response = await router.complete(prompt="Hi", stream=stream)
            assert 0.5 <= time.monotonic() - start < 15
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1
            error = response.json()["error"]
            assert error["code"] == "no_worker_available"
            assert error["message"].startswith("No worker came back within 0.5 s.")

    run_async(scenario())


def test_the_queue_is_bounded_and_a_client_that_leaves_makes_room(redis_url):
    async def scenario() -> None:
        async with router_that_lost_its_worker(redis_url, max_queue=2) as (router, come_back):
            dispatcher = router.service.dispatcher
            asked = [asyncio.create_task(router.complete(prompt="Hi")) for _ in range(2)]
            await eventually(lambda: dispatcher.admission.num_waiting == 2)
            assert (await router.complete(prompt="Hi")).status_code == 429
            asked[0].cancel()
            await eventually(lambda: dispatcher.admission.num_waiting == 1)
            asked.append(asyncio.create_task(router.complete(prompt="Hi")))
            await eventually(lambda: dispatcher.admission.num_waiting == 2)
            await come_back()
            answers = await asyncio.gather(*asked[1:])
            assert [answer.status_code for answer in answers] == [200, 200]

    run_async(scenario())


def test_a_router_that_is_new_itself_waits_for_a_worker_that_it_knows(redis_url):
    """As after the death of both: the record is still there, and nobody listens."""

    async def scenario() -> None:
        async with FakeDecodeWorker(redis_url, SECRET, answer=ANSWER) as old:
            await old.die()
            async with live_router(redis_url) as router:
                asked = asyncio.create_task(router.complete(prompt="Hi"))
                await asyncio.sleep(0.5)
                assert not asked.done()
                async with FakeDecodeWorker(redis_url, SECRET, answer=ANSWER, epoch=2):
                    assert (await asked).status_code == 200

    run_async(scenario())
