"""Embeddings that routers want of workers of both roles, with engines over fake devices.

All that a worker owns must be free at its end: `kv_services.py` sees to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest

from pagewire.shared.control.protocol import RefusalReason
from pagewire.shared.engine import thread as thread_module
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.fake_device import VOCAB, pooled_prompt
from pagewire.tests.support.kv_router import Router, prompt_of, router_of
from pagewire.tests.support.kv_services import Worker, decode_worker, prefill_worker

LONG = prompt_of(40)  # three chunks
Scenario = Callable[[Worker, Router], Awaitable[None]]
Run = Callable[[Scenario], None]


@asynccontextmanager
async def linked(role: str) -> AsyncIterator[tuple[Worker, Router]]:
    opened: AbstractAsyncContextManager[Worker]
    opened = prefill_worker() if role == "prefill" else decode_worker()
    async with opened as worker, router_of(worker) as router:
        yield worker, router


@pytest.fixture(params=["prefill", "decode"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario with a worker of each role and a router."""

    def run_scenario(scenario: Scenario) -> None:
        async def main() -> None:
            async with linked(request.param) as (worker, router):
                await scenario(worker, router)
                await eventually(worker.is_idle)
                blocks = worker.core.scheduler.pool.counts()
                assert blocks.used == blocks.cached == 0

        run_async(main())

    return run_scenario


def truth(prompt: list[int]) -> list[float]:
    found: list[float] = np.frombuffer(pooled_prompt(prompt), np.float32).tolist()
    return found


def test_prompts_of_all_lengths_at_once(run: Run) -> None:
    async def scenario(_worker: Worker, router: Router) -> None:
        prompts = {f"e{length}": prompt_of(length) for length in (1, 4, 5, 17, 40)}
        for name, prompt in prompts.items():
            router.embed(name, prompt)
        for name, prompt in prompts.items():
            assert await router.embedding(name) == truth(prompt)

    run(scenario)


def test_an_embedding_is_cut_before_it_is_normalised(run: Run) -> None:
    async def scenario(_worker: Worker, router: Router) -> None:
        router.embed("whole", LONG, normalize=True)
        router.embed("part", LONG, normalize=True, dimensions=3)
        for name, count in (("whole", None), ("part", 3)):
            expected = np.array(truth(LONG)[:count])
            expected /= np.linalg.norm(expected)
            np.testing.assert_allclose(await router.embedding(name), expected, rtol=1e-6)

    run(scenario)


def test_a_cancel_frees_what_it_holds(run: Run) -> None:
    async def scenario(worker: Worker, router: Router) -> None:
        with worker.stuck():
            for number in range(6):
                router.embed(f"e{number}", LONG)
            await eventually(lambda: worker.service.num_active == 6)
            for number in range(6):
                router.cancel(f"e{number}")
            await eventually(lambda: worker.service.num_active == 0)
        router.embed("after")
        assert await router.embedding("after") == truth(prompt_of(9))
        assert set(router.outputs) == {"after"}

    run(scenario)


def test_a_router_that_is_gone_frees_what_it_held(run: Run) -> None:
    async def scenario(worker: Worker, router: Router) -> None:
        with worker.stuck():
            router.embed(prompt=LONG)
            await eventually(lambda: worker.service.num_active == 1)
            router.client.close()
            await eventually(lambda: worker.service.num_active == 0)

    run(scenario)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the input is empty"),
        ([VOCAB], f"token ids must be below {VOCAB}"),
        ([1] * 64, "64"),  # as many as the pool has room for
    ],
)
def test_impossible_prompts_are_refused(run: Run, prompt: list[int], words: str) -> None:
    async def scenario(_worker: Worker, router: Router) -> None:
        router.embed(prompt=prompt)
        await eventually(lambda: router.refused)
        [refused] = router.refused
        assert (refused.reason, refused.param) == ("invalid", "input")
        assert words in refused.message

    run(scenario)


def test_a_request_id_that_is_in_use_is_refused(run: Run) -> None:
    async def scenario(worker: Worker, router: Router) -> None:
        with worker.stuck():
            router.embed()
            router.embed()
            await eventually(lambda: router.refused)
        assert router.refused[0].param == "request_id"
        assert await router.embedding() == truth(prompt_of(9))

    run(scenario)


@pytest.mark.parametrize("reason", ["draining", "overloaded"])
def test_workers_that_take_nothing_refuse(
    run: Run, reason: RefusalReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(worker: Worker, router: Router) -> None:
        if reason == "draining":
            worker.is_draining = True
        else:
            monkeypatch.setattr(thread_module, "MAX_COMMANDS", 0)
        router.embed()
        await eventually(lambda: router.refused)
        assert router.refused[0].reason == reason
        assert worker.service.num_active == 0

    run(scenario)


def test_a_failed_step_fails_the_embedding(run: Run) -> None:
    async def scenario(worker: Worker, router: Router) -> None:
        worker.device.fail("fail_wait", "the device failed")
        router.embed()
        await eventually(lambda: router.outputs["e"])
        [output] = router.outputs["e"]
        assert output.finish_reason == "error"
        assert output.error == "the model step failed"
        router.embed("again")
        assert await router.embedding("again") == truth(prompt_of(9))

    run(scenario)


def test_embeddings_go_along_with_answers() -> None:
    async def scenario() -> None:
        async with (
            prefill_worker() as p,
            decode_worker() as d,
            router_of(d) as router,
            router_of(p) as other,
        ):
            await d.link_to(p)
            for number in range(4):
                router.generate(f"r{number}", prompt_of(20, first=number), max_tokens=8)
                router.embed(f"e{number}", prompt_of(7, first=number))
                other.embed(f"e{number}", prompt_of(30, first=number))
                await asyncio.sleep(0)
            for number in range(4):
                await router.answer(f"r{number}")
                assert await router.embedding(f"e{number}") == truth(prompt_of(7, number))
                assert await other.embedding(f"e{number}") == truth(prompt_of(30, number))

    run_async(scenario())
