"""Samples what the load generator and the services of a cluster use of the processor.

The runner is the parent of both, so it finds them among its descendants.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from pagewire.loadtest.records import CpuSample, to_line

GENERATOR = "load generator"
MACHINE = "whole machine"
OTHERS = "other programs"
CLUSTER_COMMAND = "pagewire up"
REDIS = "redis"
SAMPLE_EVERY_S = 1.0

_COMMAND_MODULE = "pagewire.services.cli.main"


def process_name(argv: Sequence[str]) -> str | None:
    """Return how the report calls a process; None for one that belongs to its parent."""
    if not argv:
        return None
    if "redis-server" in argv[0] or any(word.endswith("fake_redis") for word in argv):
        return REDIS
    modules = [after for word, after in itertools.pairwise(argv) if word == "-m"]
    if "locust" in modules:
        return GENERATOR
    if _COMMAND_MODULE not in modules:
        return None
    command, *options = argv[argv.index(_COMMAND_MODULE) + 1 :]
    if command == "up":
        return CLUSTER_COMMAND
    return options[options.index("--worker-id") + 1] if "--worker-id" in options else command


def pin(supervisor: int) -> None:
    """Give each worker of a cluster a core of its own in turn; all else may use all cores.

    Args:
        supervisor: process id of its `pagewire up`.
    """
    cores, number = sorted(os.sched_getaffinity(0)), 0
    for child in psutil.Process(supervisor).children(recursive=True):
        name = process_name(child.cmdline()) or ""
        if name.startswith(("prefill", "decode")):
            for thread in child.threads():
                os.sched_setaffinity(thread.id, {cores[number % len(cores)]})
            number += 1


class CpuSampler:
    """Samples this process's descendants from a thread, as a context manager.

    Args:
        every_s: seconds between two samples.
    """

    def __init__(self, every_s: float = SAMPLE_EVERY_S) -> None:
        self._every_s = every_s
        self._samples: list[CpuSample] = []
        self._used: dict[tuple[int, float], float] = {}
        self._at, self._machine_used = 0.0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu sampler", daemon=True)

    def __enter__(self) -> CpuSampler:
        self.sample()  # CPU time used before does not count
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def save(self, path: Path, began: float) -> None:
        """Write the samples, a line each.

        Args:
            path: of the file.
            began: beginning of the load, by this machine's monotonic clock.
        """
        later = (
            replace(sample, t=sample.t - began) for sample in self._samples if sample.t > began
        )
        path.write_text("".join(map(to_line, later)), encoding="utf-8")

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._samples.append(self.sample())

    def sample(self) -> CpuSample:
        """Return how many cores each process has used since the sample before."""
        now, machine_used = time.monotonic(), _machine_seconds()
        elapsed, self._at = now - self._at, now
        busy = (machine_used - self._machine_used) / elapsed
        self._machine_used = machine_used
        cores = {name: seconds / elapsed for name, seconds in self._used_since().items()}
        cores |= {MACHINE: busy, OTHERS: max(0.0, busy - sum(cores.values()))}
        return CpuSample(now, cores)

    def sample_workers(self) -> dict[str, float]:
        """Return how many cores each prefill and decode worker has used since the sample before."""
        cores = sorted(self.sample().cores.items())
        return {name: used for name, used in cores if name.startswith(("prefill-", "decode-"))}

    def _used_since(self) -> dict[str, float]:
        """Return CPU seconds since the last call, by name."""
        names: dict[int, str | None] = {os.getpid(): None}
        used: dict[tuple[int, float], float] = {}
        seconds: dict[str, float] = {}
        for process in psutil.Process().children(recursive=True):  # parents before children
            try:
                with process.oneshot():
                    name = process_name(process.cmdline()) or names.get(process.ppid())
                    times, key = process.cpu_times(), (process.pid, process.create_time())
            except psutil.Error:  # it has ended
                continue
            names[process.pid] = name
            used[key] = times.user + times.system
            if name is not None:
                seconds[name] = seconds.get(name, 0.0) + used[key] - self._used.get(key, 0.0)
        self._used = used
        return seconds


def _machine_seconds() -> float:
    """Return the seconds in which any core of the machine was busy, since it was started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))
