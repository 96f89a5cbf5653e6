"""Endpoints in the threads of their engines, which sleep when there is nothing to do."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pagewire.shared.engine import thread as thread_module
from pagewire.tests.support.aio import eventually, run_async
from pagewire.tests.support.kv_router import prompt_of, router_of
from pagewire.tests.support.kv_services import decode_worker, prefill_worker
from pagewire.tests.support.kv_sides import TRANSPORTS

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle loop sleeps for ever unless it is woken."""
    monkeypatch.setattr(thread_module, "IDLE_WAIT_S", 60.0)


@TRANSPORTS
def test_messages_wake_the_engines_and_nothing_else_has_to(kind: str) -> None:
    async def scenario() -> None:
        threads = {*threading.enumerate()}
        async with (
            prefill_worker(transports=(kind,)) as p,
            decode_worker(transports=(kind,)) as d,
            router_of(d) as router,
        ):
            await d.link_to(p)
            router.generate(prompt=prompt_of(18))
            await router.answer()
            assert router.prefilled_by() == "prefill-0"
            await eventually(lambda: p.sender.num_jobs == 0)
            assert p.sender.stats.outcomes == {"ok": 3}
            own = [each.name for each in {*threading.enumerate()} - threads]
            assert [name for name in own if not name.startswith("asyncio")] == ["engine"] * 2

    run_async(scenario())


@TRANSPORTS
def test_an_idle_pair_sleeps(kind: str) -> None:
    async def scenario() -> None:
        async with (
            prefill_worker(transports=(kind,)) as p,
            decode_worker(transports=(kind,)) as d,
        ):
            await d.link_to(p)
            await eventually(lambda: not (p.core.hooks_busy or d.core.hooks_busy))
            engines, iterations = (p.engine.thread, d.engine.thread), -1
            while iterations != (now := sum(each.iterations for each in engines)):
                iterations = now  # until the last message is read
                await asyncio.sleep(0.1)
            cpu_s = time.process_time()
            time.sleep(0.3)  # noqa: ASYNC251 - only the engines' threads may run
            assert time.process_time() - cpu_s < 0.1
            assert sum(each.iterations for each in engines) == iterations

    run_async(scenario(), 40)
