"""Whether work grows in proportion to its input, on machines of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP = 16
ATTEMPTS = 4


def grows_in_proportion(work: Callable[[int], object], size: int) -> bool:
    """Return whether an input that is 16 times as long takes less than 32 times the CPU time.

    Work that grows with the square takes up to 256 times as long. Other processes on the same core
    can slow either run down, so that one attempt out of four is enough.

    Args:
        work: does the work for an input of a given length.
        size: the longer input's length; the shorter one must take milliseconds.
    """

    def cpu_s(length: int) -> float:
        start = time.process_time()
        work(length)
        return time.process_time() - start

    return any(cpu_s(size) < 2 * STEP * cpu_s(size // STEP) for _ in range(ATTEMPTS))
