"""Workers of two ranks each, of which any is killed or stopped while requests are under way.

`PAGEWIRE_TEST_RANK_REQUESTS` asks for more requests than CI sends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from functools import partial

import psutil
import pytest

from pagewire.shared.engine.ranks.group import PROGRAM
from pagewire.tests.support.aio import run_async, wait_until
from pagewire.tests.support.greedy_prompts import GreedyPrompts, greedy_prompts
from pagewire.tests.support.local_cluster import LocalCluster, local_cluster

REQUESTS = int(os.environ.get("PAGEWIRE_TEST_RANK_REQUESTS", "200"))
AT_ONCE = 8
MAX_TOKENS = 12
OPTIONS = ("--device", "cpu", "--routers", "1", "--tensor-parallel-size", "2")
FAULTS = [
    ("prefill-0", 1, signal.SIGKILL),
    ("decode-0", 0, signal.SIGKILL),
    ("decode-1", 1, signal.SIGSTOP),
    ("prefill-1", 1, signal.SIGSTOP),
    ("decode-0", 1, signal.SIGKILL),
    ("prefill-0", 0, signal.SIGKILL),
]
LEAST_FAULTS = 3

pytestmark = pytest.mark.timeout(300 + REQUESTS)


def rank_pid(cluster: LocalCluster, worker: str, rank: int) -> int:
    """Return the process of a worker's rank; rank 0 is the worker itself."""
    pid = cluster.worker_pid(worker)
    if rank == 0:
        return pid
    [other] = [each.pid for each in psutil.Process(pid).children() if PROGRAM in each.cmdline()]
    return other


def epoch_of(cluster: LocalCluster, worker: str) -> int | None:
    """Return which of its starts a worker is in; None while it is away."""
    services = {each["id"]: each["epoch"] for each in cluster.health()["services"]}
    return services.get(worker)


def is_back(cluster: LocalCluster, worker: str, before: int | None) -> bool:
    return epoch_of(cluster, worker) not in (None, before)


def make_faults(cluster: LocalCluster, are_answered: threading.Event) -> int:
    """Kill and stop ranks in turn until all is answered; return how many."""
    rng = random.Random(0)
    for number, (worker, rank, signum) in enumerate(itertools.cycle(FAULTS)):
        if number >= LEAST_FAULTS and are_answered.is_set():
            return number
        time.sleep(rng.uniform(0.1, 1.0))
        before = epoch_of(cluster, worker)
        os.kill(rank_pid(cluster, worker, rank), signum)
        wait_until(partial(is_back, cluster, worker, before), 60, lambda: cluster.output, every=0.1)
        cluster.wait_whole()
    raise AssertionError("unreachable")


async def ask_meanwhile(cluster: LocalCluster, expected: GreedyPrompts) -> tuple[int, int]:
    """Ask for answers, which must be the right ones, and make faults; count both."""
    are_answered = threading.Event()
    faults = asyncio.create_task(asyncio.to_thread(make_faults, cluster, are_answered))
    answered = 0
    try:
        while not faults.done():
            answered += len(await expected.ask(cluster.url, AT_ONCE, timeout=100))
            if answered >= REQUESTS:
                are_answered.set()
    finally:
        are_answered.set()
    return answered, await faults


def test_lost_ranks_cost_no_answer_and_no_block() -> None:
    expected = greedy_prompts(MAX_TOKENS)
    workers = ("--prefill", "2", "--decode", "2")
    with local_cluster(*workers, *OPTIONS) as cluster:
        cluster.wait_whole()
        answered, faults = run_async(ask_meanwhile(cluster, expected), 240 + REQUESTS)
        print(f"{answered} answers, {faults} faults")
        assert answered >= REQUESTS
        assert faults >= LEAST_FAULTS
        cluster.wait_idle(workers=4)
