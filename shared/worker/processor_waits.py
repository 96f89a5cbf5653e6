"""How long this process's threads have waited for a processor, by the kernel's account."""

from __future__ import annotations

from pathlib import Path

_THREADS = Path("/proc/self/task")
_NS = 1e-9


class ProcessorWaits:
    """Measures how long threads that could have run did not, since other work had the processors.

    See /proc/PID/schedstat in proc(5). Where the kernel does not count that, it is 0.
    """

    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def since_last(self) -> float:
        """Return the longest such wait of one thread since the last call, in seconds."""
        known, self._known = self._known, _waits()
        return max(
            (wait - known.get(name, wait) for name, wait in self._known.items()), default=0.0
        )


def _waits() -> dict[str, float]:
    """Return each thread's total wait so far, in seconds, by thread id."""
    found = {}
    for thread in _THREADS.glob("*/schedstat"):
        try:
            _, waited_ns, _ = thread.read_text().split()
        except (OSError, ValueError):  # the thread has ended, or another form of the file
            continue
        found[thread.parent.name] = int(waited_ns) * _NS
    return found
