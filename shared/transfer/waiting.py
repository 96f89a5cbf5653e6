"""Deadlines and cancellation, as the transports need them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from pagewire.shared.errors import TransferTimeoutError


@asynccontextmanager
async def until(deadline: float, what: str) -> AsyncIterator[None]:
    """Bound a block by a deadline.

    Args:
        deadline: in the event loop's time.
        what: subject and verb of the message, e.g. "the peer did not answer".

    Raises:
        TransferTimeoutError: the block was not done "in time".
    """
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as exc:
        raise TransferTimeoutError(f"{what} in time") from exc


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run something to its end; a cancellation that comes meanwhile is raised afterwards."""
    task = asyncio.create_task(work)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            interruption = exc
    task.result()
    if interruption is not None:
        raise interruption
