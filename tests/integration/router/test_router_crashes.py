"""Workers that crash: a router looks up why, and counts that for or against the requests."""

from __future__ import annotations

import asyncio

from pagewire.services.router.dispatch.dispatcher import MAX_LOSSES
from pagewire.shared.cluster.crash_reports import CrashReport, CrashReports
from pagewire.shared.cluster.redis_client import connect_redis
from pagewire.tests.integration.router.test_router_moves import TEXT, Workers, with_workers
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker
from pagewire.tests.support.live_router import SECRET, LiveRouter

TOKENS = 200


async def crash(
    redis_url: str, worker: FakeDecodeWorker, suspects: list[str], in_step: bool = True
) -> None:
    """End a worker as its crash does, which its reporter has published before."""
    redis = await connect_redis(redis_url)
    try:
        report = CrashReport("the worker's process crashed", suspects, in_step)
        await CrashReports(redis, SECRET).publish(
            worker.record.worker_id, worker.record.epoch, report
        )
    finally:
        await redis.aclose()
    await worker.die()


async def next_attempt(workers: Workers) -> FakeDecodeWorker:
    """Wait until a worker has the request, and return that worker."""
    await eventually(lambda: any(worker.active for worker in workers))
    return next(worker for worker in workers if worker.active)


def test_a_request_that_is_suspected_in_two_crashes_ends_with_an_error(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for worker in workers:
            worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt=[5] * 9, max_tokens=TOKENS))
        for strikes in range(2):
            worker = await next_attempt(workers)
            assert worker.generated[0].strikes == strikes
            await crash(redis_url, worker, [worker.generated[0].request_id])
        response = await pending
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "request_harms_workers"
        assert sum(len(worker.generated) for worker in workers) == 2

    with_workers(redis_url, 3, scenario)


def test_crashes_with_others_in_the_step_do_not_count(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for worker in workers:
            worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt=[5] * 9, max_tokens=TOKENS))
        for _ in range(MAX_LOSSES + 1):
            await crash(redis_url, await next_attempt(workers), ["another"])
        for worker in workers:
            worker.hold.set()
        assert (await pending).json()["choices"][0]["text"] == TEXT

    with_workers(redis_url, MAX_LOSSES + 2, scenario)


def test_a_request_that_went_on_after_a_crash_is_suspected_no_more(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        pending = asyncio.create_task(router.complete(prompt=[5] * 9, max_tokens=TOKENS))
        for strikes in (0, 1, 1):
            worker = await next_attempt(workers)
            assert worker.generated[0].strikes == strikes
            await asyncio.sleep(0.2)  # for more tokens than clear it
            await crash(redis_url, worker, [worker.generated[0].request_id])
        assert (await pending).json()["choices"][0]["text"] == TEXT

    with_workers(redis_url, 4, scenario)


def test_crashes_outside_steps_are_losses_like_others(redis_url: str) -> None:
    async def scenario(router: LiveRouter, workers: Workers) -> None:
        for worker in workers:
            worker.hold.clear()
        pending = asyncio.create_task(router.complete(prompt=[5] * 9, max_tokens=TOKENS))
        for _ in range(MAX_LOSSES + 1):
            await crash(redis_url, await next_attempt(workers), [], in_step=False)
        response = await pending
        assert response.status_code == 500
        assert response.json()["error"]["code"] != "request_harms_workers"
        assert sum(len(worker.generated) for worker in workers) == MAX_LOSSES + 1

    with_workers(redis_url, MAX_LOSSES + 2, scenario)
