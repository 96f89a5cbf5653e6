"""Threads that are kept awake while blocks are about to cross."""

from __future__ import annotations

import asyncio

from pagewire.shared.engine.thread import POLL_S, EngineThread
from pagewire.shared.worker.tasks import TaskSet
from pagewire.shared.worker.vigil import Vigil
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fake_device import make_core


async def turns_of(engine: EngineThread, seconds: float) -> int:
    before = engine.turns
    await asyncio.sleep(seconds)
    return engine.turns - before


def test_the_engine_turns_often_while_a_vigil_is_kept() -> None:
    async def check() -> None:
        needed = {"a", "b"}
        engine = EngineThread(make_core()[0], lambda outputs: None)
        tasks = TaskSet()
        vigil = Vigil(engine, tasks, lambda: bool(needed))
        engine.start()
        try:
            assert await turns_of(engine, 0.3) < 10
            vigil.begin()
            vigil.begin()  # for the second
            assert await turns_of(engine, 0.3) > 0.01 / POLL_S
            needed.clear()
            await asyncio.sleep(0.05)
            assert await turns_of(engine, 0.3) < 10
            needed.add("c")
            vigil.begin()
            assert await turns_of(engine, 0.3) > 0.01 / POLL_S
            await tasks.close()
            assert await turns_of(engine, 0.3) < 10
        finally:
            await tasks.close()
            assert engine.stop(5)

    run_async(check(), 30)
