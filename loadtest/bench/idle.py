"""Measures the CPU time of the workers of an idle cluster."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pagewire.loadtest.bench.phases import Row
from pagewire.loadtest.cluster import BenchError

SETTLE_S = 3.0
SECONDS = 20.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def idle(up_pid: int, seconds: float = SECONDS) -> list[Row]:
    """Return each worker's CPU time, in percent of one core.

    Args:
        up_pid: process id of `pagewire up`.
        seconds: duration of the measurement.

    Raises:
        BenchError: there are no workers, or one has ended meanwhile.
    """
    time.sleep(SETTLE_S)
    workers = _workers(up_pid)
    if not workers:
        raise BenchError(f"no worker runs under process {up_pid}")
    began, before = time.monotonic(), [_used_s(pid) for pid in workers]
    time.sleep(seconds)
    elapsed, after = time.monotonic() - began, [_used_s(pid) for pid in workers]
    return [
        {"what": "idle", "worker": name, "percent_of_a_core": (new - old) / elapsed * 100}
        for name, old, new in zip(workers.values(), before, after, strict=True)
    ]


def _workers(up_pid: int) -> dict[int, str]:
    """Return the names of the workers that `pagewire up` has started, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_text(errors="replace").split("\0")
            parent = int(_fields(int(entry.name))[1])
        except OSError:  # it has ended
            continue
        if "--worker-id" in words and parent == up_pid:
            found[int(entry.name)] = words[words.index("--worker-id") + 1]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _used_s(pid: int) -> float:
    try:
        user, system = _fields(pid)[11:13]
    except OSError as exc:
        raise BenchError(f"worker process {pid} has ended") from exc
    return (int(user) + int(system)) / _TICKS_PER_S


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
