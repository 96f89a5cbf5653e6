"""How many threads torch's operations get on the CPU: fewer for a small model.

Splitting an operation among threads costs some microseconds, and all threads wait for the last one.
If another program keeps a core busy, they wait until the system stops that program. On two idle
cores, two threads decode the demo model (1.9 million parameters) hardly faster than one, and a
model of 8 million parameters 1.4 to 1.7 times as fast. With one core busy, the demo model is 2 to
12 times slower with two threads.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from pagewire.shared.model.loaded_model import LoadedModel
from pagewire.shared.settings.config import threads_are_chosen

logger = logging.getLogger(__name__)

PARAMETERS_PER_THREAD = 4_000_000
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def settle_threads(model: LoadedModel, device: torch.device, ranks: int = 1) -> None:
    """Lower torch's number of threads, for the whole process, to what a model can use.

    Ranks of one model share the cores.

    A number set by OMP_NUM_THREADS, MKL_NUM_THREADS or `torch.set_num_threads` stays. The exception
    is a call of `torch.set_num_threads` with torch's own default, which cannot be detected.

    Args:
        model: its number of parameters decides.
        device: the model's device; on a GPU nothing is changed.
        ranks: number of processes that compute the model together.
    """
    if device.type != "cpu":
        return
    parameters = sum(each.numel() for each in model.stored())
    current = torch.get_num_threads()
    useful = min(1 + parameters // PARAMETERS_PER_THREAD, max(1, current // ranks))
    if useful < current and not threads_are_chosen() and current in _defaults():
        why = "the model is small" if ranks == 1 else f"{ranks} ranks share the cores"
        logger.info("using %d of %d torch threads: %s", useful, current, why)
        torch.set_num_threads(useful)


def _defaults() -> set[int]:
    """Return what torch may choose itself: a thread for each logical or for each physical core."""
    if not hasattr(os, "sched_getaffinity"):
        return {os.cpu_count() or 1}
    cores = os.sched_getaffinity(0)
    defaults = {len(cores)}
    try:
        defaults.add(len({Path(TOPOLOGY.format(core)).read_text() for core in cores}))
    except OSError:  # a sandbox may hide it
        logger.debug("cannot count the physical cores")
    return defaults
