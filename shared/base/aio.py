"""Starts and cancels background asyncio tasks, and logs their failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_CANCEL_INTERVAL_S = 0.5


def start_task(coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task; log its failure at once, which can only be a bug.

    The caller keeps the task and ends it with `end_task`.
    """
    task = asyncio.create_task(coro, name=name)
    task.add_done_callback(_log_failure)
    return task


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it has ended, in whatever way. Does nothing for None."""
    while task is not None and not task.done():
        # Again and again: what a library awaits may swallow a cancellation, as asyncio.wait_for
        # of Python 3.11 does.
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_INTERVAL_S)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        logger.error("background task %s failed", task.get_name(), exc_info=exc)
