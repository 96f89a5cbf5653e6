"""Background tasks with an owner: errors are logged, and closing cancels what still runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from pagewire.shared.base.aio import end_task, start_task

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class TaskSet:
    """Tasks that end when their owner does."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine in the background."""
        task = start_task(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all tasks, also those that they start meanwhile, and wait for their end.

        One that does not end in time is named in the log and left.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._tasks:
                    await asyncio.gather(*map(end_task, self._tasks))
        for task in self._tasks:
            logger.error("%s did not end in %g s", task.get_name(), CLOSE_TIMEOUT_S)
