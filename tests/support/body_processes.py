"""The processes in which routers read large bodies and try grammars."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import psutil

from pagewire.services.router.http.body_processes.reader import THREAD_BODY_BYTES
from pagewire.tests.support.aio import eventually
from pagewire.tests.support.live_router import LiveRouter

LONG = "Hi " * THREAD_BODY_BYTES


def body_processes(parent: int, program: bytes = b"body_process") -> list[int]:
    """Return the ids of a process's children that read bodies, or run another program."""
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if program in " ".join(child.cmdline()).encode():
                found.append(child.pid)
    return found


@asynccontextmanager
async def stopped_body_processes(
    router: LiveRouter, count: int
) -> AsyncIterator[Callable[[], Awaitable[list[httpx.Response]]]]:
    """Give each body process of this process a body, and stop it (SIGSTOP) until the block ends.

    Yields:
        A function that waits for the answers to these bodies; call it after the block.
    """
    tasks: list[asyncio.Task[httpx.Response]] = []
    admission = router.service.dispatcher.admission
    for _ in range(count):
        tasks.append(asyncio.create_task(router.complete(prompt=LONG, n=17)))
    await eventually(lambda: len(body_processes(os.getpid())) == count)
    stopped = body_processes(os.getpid())
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert admission.num_reading == count
        yield lambda: asyncio.gather(*tasks)
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
