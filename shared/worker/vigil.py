"""Keeps a worker's threads from falling asleep while KV blocks are about to cross."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagewire.shared.engine.thread import EngineThread
from pagewire.shared.worker.tasks import TaskSet

# Short against the milliseconds after which a thread is slow to wake up; asyncio rounds a sleep up
# to the next millisecond, so that less makes no difference.
TICK_S = 0.001


class Vigil:
    """Keeps the event loop turning and the engine's thread looking, for as long as it is needed.

    The way of a piece leads through both threads of both workers, and each takes 0.1 to 0.2 ms
    longer for its share if it has slept for some milliseconds before (measured beside H200s).
    Only worth it where a piece takes no longer than that: between GPUs.
    """

    def __init__(self, engine: EngineThread, tasks: TaskSet, is_needed: Callable[[], bool]) -> None:
        """Prepare.

        Args:
            engine: of the worker.
            tasks: own the loop's turns.
            is_needed: asked in the event loop, with every turn.
        """
        self._engine = engine
        self._tasks = tasks
        self._is_needed = is_needed
        self._is_kept = False

    def begin(self) -> None:
        """Keep it for as long as it is needed, if it is."""
        if not self._is_kept and self._is_needed():
            self._is_kept = True
            self._tasks.spawn(self._keep(), "keeping a vigil")

    async def _keep(self) -> None:
        self._engine.keep_awake(True)
        try:
            while self._is_needed():  # noqa: ASYNC110 - to be awake is the point
                await asyncio.sleep(TICK_S)
        finally:
            self._is_kept = False
            self._engine.keep_awake(False)
