"""A few turns at once: who gets the next one, and what cancelling leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pagewire.services.router.http.body_processes.owner_turns import Turns
from pagewire.tests.support.aio import run_async


class Line:
    """Tasks that take turns, and the order in which these began."""

    def __init__(self, count: int, max_each: Callable[[], int] = lambda: 99) -> None:
        self.turns, self.begun = Turns(count, max_each), list[str]()

    async def push(self, *names: str) -> list[asyncio.Task[None]]:
        """Let tasks wait for a turn of the owner that their first letter names."""
        tasks = [asyncio.create_task(self._begin(name)) for name in names]
        await asyncio.sleep(0)
        return tasks

    async def _begin(self, name: str) -> None:
        await self.turns.begin(name[0])
        self.begun.append(name)

    async def end(self, *owners: str) -> None:
        for owner in owners:
            self.turns.end(owner)
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def test_owners_take_turns() -> None:
    async def scenario() -> None:
        line = Line(2)
        await line.push("a1", "a2", "a3", "a4", "b1", "b2")
        assert line.begun == ["a1", "a2"]
        await line.end("a", "a", "b", "a", "b")
        assert line.begun == ["a1", "a2", "b1", "a3", "b2", "a4"]
        assert len(line.turns) == 0

    run_async(scenario())


def test_an_owner_has_as_many_turns_at_once_as_it_may_now() -> None:
    async def scenario() -> None:
        bounds = [1]
        line = Line(3, lambda: bounds[0])
        await line.push("a1", "a2", "a3", "b1")
        assert line.begun == ["a1", "b1"]
        bounds[0] = 2
        await line.end("b")
        assert line.begun == ["a1", "b1", "a2"]
        await line.end("a")
        assert line.begun == ["a1", "b1", "a2", "a3"]

    run_async(scenario())


@pytest.mark.parametrize("is_granted", [False, True])
def test_whoever_is_cancelled_keeps_no_turn_and_no_place(is_granted: bool) -> None:
    async def scenario() -> None:
        line = Line(1)
        await line.push("a1")
        gone, _ = await line.push("b1", "c1")
        if is_granted:  # its turn has begun, which it has not noticed
            line.turns.end("a")
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.sleep(0)
        if not is_granted:
            await line.end("a")
        assert line.begun == ["a1", "c1"]
        await line.end("c")
        await line.push("d1")
        assert line.begun == ["a1", "c1", "d1"]

    run_async(scenario())


def test_a_turn_is_not_given_to_a_task_that_has_just_been_cancelled() -> None:
    async def scenario() -> None:
        line = Line(1)
        await line.push("a1")
        (waiting,) = await line.push("b1")
        waiting.cancel()  # it notices only when the loop comes to it
        line.turns.end("a")
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await line.push("c1")
        assert line.begun == ["a1", "c1"]

    run_async(scenario())
