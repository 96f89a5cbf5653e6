"""Bench of what disaggregation adds to a request: 1P1D against one aggregated worker.

Both clusters run at the same time on the same two GPUs; the aggregated worker shares the prefill
worker's GPU. They get requests in turn, one at a time, so that changes of the machine's speed
affect both.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from pagewire.loadtest.bench.client import Client, TimedAnswer
from pagewire.loadtest.bench.clusters import Topology, running_cluster
from pagewire.loadtest.bench.phases import Row

PROMPTS = (1024, 4096, 8192)
PAIRS = 31  # requests of each length to each cluster
WARM_UP_PAIRS = 3
TOKENS = 8  # length of an answer
MEMORY = ("--gpu-memory-utilization", "0.4")  # a worker of each cluster shares the first GPU


def handover(model: Path, budget: int, logs: Path, options: Sequence[str]) -> list[Row]:
    """Start both clusters and compare them; times in ms.

    Args:
        model: the model's directory.
        budget: tokens per step.
        logs: folder that gets a subfolder for each cluster's logs.
        options: further options of `pagewire up`.

    Raises:
        BenchError: a cluster did not start, or an answer was wrong.
    """
    with contextlib.ExitStack() as stack:
        urls = []
        for topology in (Topology(1, 1, budget), Topology(0, 1, budget)):
            cluster = running_cluster(model, topology, logs / "handover", *MEMORY, *options)
            urls.append(stack.enter_context(cluster).url)
        return asyncio.run(_ask_both(urls))


async def _ask_both(urls: list[str]) -> list[Row]:
    apart, aggregated = (Client([url]) for url in urls)
    async with aclosing(apart), aclosing(aggregated):
        return [await ask_in_turn([apart, aggregated], length) for length in PROMPTS]


async def ask_in_turn(clients: Sequence[Client], length: int) -> Row:
    """Send two clusters the same prompts of a length, in turn.

    Args:
        clients: clients of the disaggregated and of the aggregated cluster; they alternate in
            being first.
        length: length of the prompts in tokens.

    Raises:
        BenchError: a request failed, or the number of tokens is wrong.
    """
    answers: tuple[list[TimedAnswer], list[TimedAnswer]] = ([], [])
    for number in range(WARM_UP_PAIRS + PAIRS):
        request = clients[0].prepare(length, TOKENS)
        for which in ((0, 1), (1, 0))[number % 2]:
            answers[which].append(await clients[which].ask(request))
    apart, aggregated = (answer[WARM_UP_PAIRS:] for answer in answers)
    head = {"what": "handover", "prompt": length, "requests": PAIRS}
    return {**head, **ratios(apart, aggregated)}


def ratios(apart: list[TimedAnswer], aggregated: list[TimedAnswer]) -> Row:
    """Return medians and quartiles of the times to first and second token, in ms.

    `ttft_ratio` and `second_ratio` are medians of `apart` / medians of `aggregated`.

    Args:
        apart: answers of the disaggregated cluster.
        aggregated: answers of the aggregated one.
    """
    row: Row = {}
    for number, token in enumerate(("ttft", "second")):
        medians = []
        for prefix, answers in (("", apart), ("aggregated_", aggregated)):
            times = [answer.times[number] * 1e3 for answer in answers]
            low, median, high = statistics.quantiles(times, n=4, method="inclusive")
            row |= {f"{prefix}{token}": median, f"{prefix}{token}_quartiles": [low, high]}
            medians.append(median)
        row[f"{token}_ratio"] = medians[0] / medians[1]
    return row
