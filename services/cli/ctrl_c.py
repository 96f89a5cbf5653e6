"""Takes Ctrl-C as a request to stop, for commands that still report results afterwards."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

STOP_S = 5.0


class CtrlC:
    """A context in which the first Ctrl-C cancels the work of `ends`; later ones have no effect.

    After the context, if Ctrl-C was pressed, the next one kills the process without a traceback. If
    SIGINT was ignored before, as in a background job, it stays ignored.

    Args:
        loop: the event loop in which `ends` is called; it must stay open until the context ends.

    Attributes:
        pressed: whether Ctrl-C was pressed.
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

    def __exit__(self, *exc_info: object) -> None:
        # Python prints a traceback for a signal that comes while its handler is replaced.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.SIG_DFL if self.pressed else self._before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        self._loop.call_soon_threadsafe(self._stop.set)

    async def ends(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the work, or None if Ctrl-C cancelled it (takes up to `STOP_S`)."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait([task], timeout=STOP_S)
            if task.done() and not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not print it
            return None
        finally:
            task.cancel()
            stopped.cancel()
