"""Measures the CPU time of the workers of an idle cluster."""

from __future__ import annotations

import time

from pagewire.loadtest.bench.phases import Row
from pagewire.loadtest.cluster import BenchError
from pagewire.loadtest.cpu import CpuSampler

SETTLE_S = 3.0
SECONDS = 20.0


def idle(seconds: float = SECONDS) -> list[Row]:
    """Return the CPU time of each worker that this process has started, in percent of one core.

    Args:
        seconds: duration of the measurement.

    Raises:
        BenchError: there are no workers, or one has ended meanwhile.
    """
    time.sleep(SETTLE_S)
    sampler = CpuSampler()
    before = sampler.sample_workers()
    time.sleep(seconds)
    after = sampler.sample_workers()
    if not before or before.keys() != after.keys():
        raise BenchError(f"workers were {list(before)} at first, and {list(after)} at the end")
    return [
        {"what": "idle", "worker": name, "percent_of_a_core": 100 * cores}
        for name, cores in after.items()
    ]
