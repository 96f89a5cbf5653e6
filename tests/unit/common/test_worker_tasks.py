import asyncio

import pytest

from pagewire.shared.worker import tasks as tasks_module
from pagewire.shared.worker.tasks import TaskSet
from pagewire.tests.support.aio import run_async


async def stubborn(refusals: int) -> None:
    """Swallow this many cancellations, as `asyncio.wait_for` may."""
    for _ in range(refusals):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(60)


def test_closing_ends_tasks_that_swallow_a_cancellation() -> None:
    async def scenario() -> None:
        tasks = TaskSet()
        spawned = [tasks.spawn(stubborn(1), f"stubborn {i}") for i in range(3)]
        await asyncio.sleep(0)
        await tasks.close()
        assert all(task.cancelled() for task in spawned)

    run_async(scenario(), timeout=5)


def test_closing_ends_what_ending_tasks_start() -> None:
    async def scenario() -> None:
        tasks = TaskSet()

        async def parent() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                tasks.spawn(asyncio.sleep(60), "child")

        tasks.spawn(parent(), "parent")
        await asyncio.sleep(0)
        await tasks.close()

    run_async(scenario(), timeout=5)  # which finds tasks that are left


def test_a_task_that_does_not_end_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks_module, "CLOSE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        tasks = TaskSet()
        task = tasks.spawn(stubborn(1), "stubborn")
        await asyncio.sleep(0)
        await tasks.close()
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    run_async(scenario(), timeout=5)
    assert "stubborn did not end in 0.2 s" in caplog.text


def test_a_failure_is_logged_and_closing_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    async def scenario() -> None:
        tasks = TaskSet()
        tasks.spawn(fail(), "buggy")
        await asyncio.sleep(0.01)
        await tasks.close()

    run_async(scenario())
    assert "buggy failed" in caplog.text
