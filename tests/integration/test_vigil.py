"""Threads that are kept awake while blocks are about to cross."""

from __future__ import annotations

import asyncio

from pagewire.shared.engine.step import StepPlan
from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.worker.tasks import TaskSet
from pagewire.shared.worker.vigil import Vigil
from pagewire.tests.support.aio import run_async
from pagewire.tests.support.fake_device import make_core


class Hook:
    """Counts how often it is looked at."""

    def __init__(self) -> None:
        self.looks = 0

    def after_launch(self, plan: StepPlan | None) -> bool:
        return False

    def is_due(self) -> bool:
        self.looks += 1
        return False

    async def looks_within(self, seconds: float) -> int:
        before = self.looks
        await asyncio.sleep(seconds)
        return self.looks - before


def test_the_engine_looks_often_while_a_vigil_is_kept() -> None:
    async def check() -> None:
        needed = {"a", "b"}
        core, hook = make_core()[0], Hook()
        core.hooks.append(hook)
        engine = EngineThread(core, lambda outputs: None)
        tasks = TaskSet()
        vigil = Vigil(engine, tasks, lambda: bool(needed))
        engine.start()
        try:
            assert await hook.looks_within(0.3) == 0
            vigil.begin()
            vigil.begin()  # for the second
            assert await hook.looks_within(0.3) > 100
            needed.clear()
            await asyncio.sleep(0.3)
            assert await hook.looks_within(0.3) == 0
            needed.add("c")
            vigil.begin()
            assert await hook.looks_within(0.3) > 100
            await tasks.close()
            await asyncio.sleep(0.3)
            assert await hook.looks_within(0.3) == 0
        finally:
            await tasks.close()
            assert engine.stop(5)

    run_async(check(), 30)
