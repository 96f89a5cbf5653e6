"""Requests that come at random times: how many an endpoint completes, and keeps a promise to.

The same load may be sent before it is measured. Rates are numbers of requests divided by the time
from the first arrival to the last answer. The clients are spread over processes, so that they do
not limit the server.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pagewire.loadtest.bench.child import SPAWN
from pagewire.loadtest.bench.client import Client
from pagewire.loadtest.bench.open_load import PROMISE, Arrival, OpenLoad
from pagewire.loadtest.bench.phases import Row
from pagewire.loadtest.bench.shapes import VOCAB_USED
from pagewire.loadtest.cluster import BenchError
from pagewire.services.cli.bench.stats import percentile
from pagewire.services.cli.simulation.results import PARTS

START_S = 5.0  # for the processes to start
MAX_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Job:
    """The requests of one process.

    Attributes:
        urls: URLs of endpoints, used in turn.
        seed: decides the prompts.
        start: of the load, by the monotonic clock.
        more: further fields of the requests.
    """

    urls: Sequence[str]
    seed: int
    arrivals: Sequence[Arrival]
    start: float
    vocab: int
    more: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request; times in seconds.

    Attributes:
        end: of the answer, from the load's start.
        late: how long after its time it was sent.
        error: empty for a complete answer.
    """

    end: float
    late: float
    ttft: float
    gaps: Sequence[float]
    error: str = ""


def goodput(
    urls: Sequence[str],
    load: OpenLoad,
    seconds: float,
    *,
    vocab: int = VOCAB_USED,
    warm_up: bool = True,
    **more: Any,
) -> Row:
    """Send a load; return its figures, times in ms.

    Args:
        urls: URLs of endpoints, used in turn.
        load: the load.
        seconds: how long requests arrive.
        vocab: upper bound (exclusive) of token ids in prompts.
        warm_up: the same load is sent once before.
        more: further fields of the requests.

    Raises:
        BenchError: no request was answered.
    """
    arrivals = load.arrivals(seconds)
    processes = min(MAX_PROCESSES, max(1, (os.cpu_count() or 1) // 2), len(arrivals))
    first, outcomes = load.seed * MAX_PROCESSES, list[Outcome]()
    with ProcessPoolExecutor(processes, mp_context=SPAWN) as pool:
        for _ in range(1 + warm_up):
            start = time.monotonic() + START_S
            jobs = [
                Job(urls, first + number, arrivals[number::processes], start, vocab, more)
                for number in range(processes)
            ]
            outcomes = [outcome for part in pool.map(_run, jobs) for outcome in part]
    return figures(load, outcomes)


def figures(load: OpenLoad, outcomes: Sequence[Outcome]) -> Row:
    """Return a row of the table.

    Raises:
        BenchError: no request was answered.
    """
    answered = [outcome for outcome in outcomes if not outcome.error]
    if not answered:
        raise BenchError(f"no request was answered: {outcomes[0].error}")
    gaps = [gap for outcome in answered for gap in outcome.gaps]
    means = [statistics.mean(outcome.gaps) for outcome in answered if outcome.gaps]
    took_s = max(outcome.end for outcome in answered)
    broken = [PROMISE.broken_by(outcome.ttft, outcome.gaps) for outcome in answered]
    kept = broken.count(set())
    ttft = [outcome.ttft for outcome in answered]
    times = {
        "ttft_p50": percentile(ttft, 50),
        "ttft_p99": percentile(ttft, 99),
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "tpot_p50": percentile(means, 50),
        "late_p99": percentile([outcome.late for outcome in answered], 99),
    }
    return {
        "what": "goodput",
        "kind": f"rate {load.rate:g}",
        "mix": load.mix,
        "seed": load.seed,
        "n": len(outcomes),
        "errors": len(outcomes) - len(answered),
        "chunks": sum(len(outcome.gaps) + 1 for outcome in answered),
        "req_s": len(answered) / took_s,
        "good": kept / len(outcomes),
        "good_s": kept / took_s,
        **{f"broke_{part}": sum(part in parts for parts in broken) for part in PARTS},
        **{name: value * 1e3 for name, value in times.items()},
    }


def _run(job: Job) -> list[Outcome]:
    return asyncio.run(_ask(job))


async def _ask(job: Job) -> list[Outcome]:
    client = Client(list(job.urls), vocab=job.vocab, seed=job.seed)
    requests = [
        client.prepare(arrival.prompt, arrival.answer, **job.more) for arrival in job.arrivals
    ]

    async def one(number: int) -> Outcome:
        due = job.start + job.arrivals[number].at
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        began = time.monotonic()
        try:
            answer = await client.ask(requests[number])
        except BenchError as exc:
            return Outcome(0.0, began - due, 0.0, (), str(exc))
        end = time.monotonic() - job.start
        return Outcome(end, began - due, answer.ttft, answer.gaps)

    async with aclosing(client), asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(len(requests))]
    return [task.result() for task in tasks]
