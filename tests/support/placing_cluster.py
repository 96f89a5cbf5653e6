"""A router in this process with fake workers, which shows where it places requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_decode_worker import FakeDecodeWorker, fake_prefill_worker
from pagewire.tests.support.live_router import SECRET, LiveRouter, live_router
from pagewire.tests.support.redis_server import RedisServer


class PlacingCluster:
    def __init__(
        self,
        router: LiveRouter,
        decodes: list[FakeDecodeWorker],
        prefills: list[FakeDecodeWorker],
    ) -> None:
        self.router, self.decodes, self.prefills = router, decodes, prefills

    async def ask(self, prompt: list[int], **fields: Any) -> tuple[str, list[str]]:
        """Which workers a prompt is placed at: the decode worker, and the prefill workers."""
        before = {d.record.worker_id: len(d.generated) for d in self.decodes}
        response = await self.router.complete(prompt=prompt, max_tokens=1, **fields)
        assert response.status_code == 200, response.text
        (chosen,) = [d for d in self.decodes if len(d.generated) > before[d.record.worker_id]]
        return chosen.record.worker_id, chosen.generated[-1].prefill_workers


def with_cluster(
    redis: RedisServer,
    scenario: Callable[[PlacingCluster], Awaitable[None]],
    decodes: int = 2,
    prefills: int = 2,
    **settings: Any,
) -> None:
    async def main() -> None:
        async with live_router(redis.url, **settings) as router, AsyncExitStack() as stack:
            running = [
                await stack.enter_async_context(FakeDecodeWorker(redis.url, SECRET, f"decode-{i}"))
                for i in range(decodes)
            ]
            others = [
                await stack.enter_async_context(
                    fake_prefill_worker(redis.url, SECRET, f"prefill-{i}")
                )
                for i in range(prefills)
            ]
            await router.ready(decodes)
            directory = router.service.members.directory
            await eventually(lambda: len(directory.workers("prefill")) == prefills)
            await scenario(PlacingCluster(router, running, others))

    run_async(main())
