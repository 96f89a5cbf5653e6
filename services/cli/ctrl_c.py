"""Ctrl-C as a request to stop, for work whose results must outlive it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

STOP_S = 5.0


class CtrlC:
    """While its context lasts, the first Ctrl-C ends what runs in `ends`, and more do nothing.

    Afterwards, if there was one, the next kills the process without a traceback. A SIGINT that
    is ignored stays ignored, as of a job in the background.

    Args:
        loop: where `ends` is called; closed later than the context.

    Attributes:
        pressed: whether there was one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._stop = asyncio.Event()
        self._before: Any = None
        self.pressed = False

    def __enter__(self) -> CtrlC:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL if self.pressed else self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.pressed:
            self.pressed = True
            self._loop.call_soon_threadsafe(self._stop.set)

    async def ends(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what the work does, None if Ctrl-C cancelled it, which may take `STOP_S`."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait([task], timeout=STOP_S)
            if task.done() and not task.cancelled():
                task.exception()  # asked for, or asyncio would print it: the work was to end anyway
            return None
        finally:
            task.cancel()
            stopped.cancel()
