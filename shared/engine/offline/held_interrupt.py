"""Ctrl-C in a program that generates: it takes effect between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Call the handler of a SIGINT that arrives within when the work within has ended.

    In the middle of a step, an exception would leave tokens undelivered, and ranks waiting for each
    other. A second SIGINT takes effect at once, as the step may hang. Python calls handlers in its
    main thread only, so that nothing is held elsewhere.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        held += 1
        if held > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held == 1:
        handler(signal.SIGINT, None)
