"""Running coroutines in synchronous tests, and waiting with and without an event loop."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(
    coro: Coroutine[Any, Any, T],
    timeout: float = 30.0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run a coroutine in an event loop of its own, and return its result.

    Fails if it takes longer than `timeout` seconds, leaves tasks, or if a callback of the loop
    raised.
    """
    problems: list[dict[str, Any]] = []

    async def bounded() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, ctx: problems.append(ctx))
        async with asyncio.timeout(timeout):
            result = await coro
        leftover = asyncio.all_tasks() - {asyncio.current_task()}
        # The loop closes asynchronous generators that the garbage collector has found in tasks.
        ending = {task for task in leftover if not isinstance(task.get_coro(), CoroutineType)}
        if ending:
            leftover -= (await asyncio.wait(ending, timeout=1))[0]
        assert not leftover, f"tasks left: {leftover}"
        return result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(bounded())
    assert not problems, problems
    return result


def wait_until(
    condition: Callable[[], object],
    timeout: float = 20.0,
    explain: Callable[[], str] = str,
    every: float = 0.002,
) -> None:
    """Block this thread until a condition holds; after `timeout` seconds, fail and explain."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {explain()}"
        time.sleep(every)


async def eventually(condition: Callable[[], Any], timeout: float = 20.0) -> None:
    """Wait until a condition holds, or fail."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {condition}"
        await asyncio.sleep(0.005)


async def until_returns(
    read: Callable[[], Coroutine[Any, Any, T]], expected: T, timeout: float = 20.0
) -> None:
    """Call `read` until it returns `expected`, or fail."""
    deadline = time.monotonic() + timeout
    while (found := await read()) != expected:
        assert time.monotonic() < deadline, f"{found!r} instead of {expected!r}"
        await asyncio.sleep(0.005)


async def until_one_ends(*coros: Coroutine[Any, Any, None]) -> None:
    """Run coroutines at the same time until one has ended, and cancel the others."""
    tasks = [asyncio.create_task(coro) for coro in coros]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
