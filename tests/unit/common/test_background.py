import asyncio

import pytest

from pagewire.shared.base.aio import end_task, start_task
from pagewire.tests.support.aio import run_async


def test_a_task_that_swallows_a_cancellation_is_ended_all_the_same() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    async def scenario() -> None:
        task = start_task(stubborn(), "stubborn")
        await asyncio.sleep(0)
        await end_task(task)
        assert task.cancelled()

    run_async(scenario(), timeout=5)


def test_a_failure_is_logged_with_the_tasks_name(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    async def scenario() -> None:
        task = start_task(fail(), "buggy")
        await asyncio.sleep(0.01)
        await end_task(task)

    run_async(scenario())
    assert "buggy failed" in caplog.text
    assert "a bug" in caplog.text


def test_ending_nothing_and_ending_twice_are_fine() -> None:
    async def scenario() -> None:
        task = start_task(asyncio.sleep(60), "sleeper")
        for ending in (None, task, task):
            await end_task(ending)

    run_async(scenario(), timeout=5)
