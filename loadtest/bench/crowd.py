"""Many clients in a closed loop: each sends its next request after the answer to the last one.

The clients are spread over processes, so that they do not limit the server. They start one after
the other: requests of one length that began together would also end together, and a measurement of
a few of their lifetimes would depend on where it cuts these waves. Throughput is the mean of the
measurement; `low` and `high` are those of `PARTS` equal parts of it.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field

from pagewire.loadtest.bench.child import SPAWN
from pagewire.loadtest.bench.client import Client, TimedAnswer
from pagewire.loadtest.bench.phases import Row
from pagewire.loadtest.cluster import metrics_near
from pagewire.loadtest.sampler import samples_of
from pagewire.services.cli.bench.stats import percentile

PROMPT, TOKENS = 256, 256
WARM_UP_S = 20.0
SPREAD = 0.6  # part of the warm-up in which the clients start
START_S = 5.0  # for the processes to start
MAX_PROCESSES = 16
PARTS = 5  # equal parts of a measurement
STEPS = "pagewire_engine_steps_total"


@dataclass(slots=True)
class CrowdMeasurements:
    """The measurements of a process.

    Attributes:
        gaps: times between consecutive chunks of a stream, in ms.
        ttft: times to first token, in ms.
        tokens: number of tokens that arrived in each part of the measurement.
    """

    gaps: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tokens: list[int] = field(default_factory=lambda: [0] * PARTS)

    def add(self, answer: TimedAnswer, began: float, span: tuple[float, float]) -> None:
        """Count the parts of an answer that arrived in a time span.

        Args:
            answer: the answer.
            began: time of its request, by the monotonic clock.
            span: start and end, by the same clock.
        """
        times = [began + time_s for time_s in answer.times]
        if span[0] <= times[0] < span[1]:
            self.ttft.append(answer.ttft * 1e3)
        for before, at in zip([began, *times], times, strict=False):
            if span[0] <= at < span[1]:
                self.tokens[int((at - span[0]) / (span[1] - span[0]) * PARTS)] += 1
                if before is not began and at > before:
                    self.gaps.append((at - before) * 1e3)


def start_delays(clients: int, warm_up_s: float) -> list[float]:
    """Return when each client starts, in seconds from the start of a warm-up."""
    return [SPREAD * warm_up_s * number / clients for number in range(clients)]


def crowd(urls: Sequence[str], clients: int, seconds: float) -> Row:
    """Return the throughput, TTFT, token gaps and step time under some clients; times in ms.

    Args:
        urls: URLs of endpoints, used in turn.
        clients: number of clients.
        seconds: duration of the measurement.

    Raises:
        BenchError: a request failed.
    """
    processes = min(MAX_PROCESSES, max(1, (os.cpu_count() or 1) // 2), clients)
    start = time.monotonic() + START_S
    delays = start_delays(clients, WARM_UP_S)
    with ProcessPoolExecutor(processes, mp_context=SPAWN) as pool:
        results = [
            pool.submit(_run, urls, delays[number::processes], start, seconds)
            for number in range(processes)
        ]
        step_ms = _step_ms(urls[0], start + WARM_UP_S, seconds)
        measured = [result.result() for result in results]
    gaps = [gap for seen in measured for gap in seen.gaps]
    tokens = [sum(part) for part in zip(*(seen.tokens for seen in measured), strict=True)]
    rates = [count * PARTS / seconds for count in tokens]
    return {
        "what": "crowd",
        "clients": clients,
        "tokens_per_s": sum(tokens) / seconds,
        "low": min(rates),
        "high": max(rates),
        "parts": rates,
        "gap_p50": percentile(gaps, 50),
        "gap_p99": percentile(gaps, 99),
        "ttft_p50": statistics.median(ttft for seen in measured for ttft in seen.ttft),
        "step": step_ms,
        "tokens_per_chunk": sum(tokens) / max(1, len(gaps)),
    }


def _step_ms(url: str, start: float, seconds: float) -> float | None:
    """Return the workers' mean time per step in ms, in a time span; None if there was no step."""
    time.sleep(max(0.0, start - time.monotonic()))
    before = _steps(url)
    time.sleep(seconds)
    after = _steps(url)
    counts = [after[name] - before[name] for name in before]
    means = [seconds * 1e3 / count for count in counts if count]
    return statistics.mean(means) if means else None


def _steps(url: str) -> dict[str, float]:
    """Return the number of steps of each worker so far."""
    return samples_of(metrics_near(url), STEPS)


def _run(
    urls: Sequence[str], delays: Sequence[float], start: float, seconds: float
) -> CrowdMeasurements:
    """Run the clients of one process; see `_ask`."""
    return asyncio.run(_ask(urls, delays, start, seconds))


async def _ask(
    urls: Sequence[str], delays: Sequence[float], start: float, seconds: float
) -> CrowdMeasurements:
    """Run some clients.

    Args:
        urls: URLs of endpoints, used in turn.
        delays: start of each client, in seconds from `start`.
        start: start of the warm-up, by the monotonic clock.
        seconds: duration of the measurement after it.
    """
    seen, client = CrowdMeasurements(), Client(list(urls))
    begin = start + WARM_UP_S
    measured = (begin, begin + seconds)

    async def loop(delay: float) -> None:
        await asyncio.sleep(delay)
        while time.monotonic() < measured[1]:
            request = client.prepare(PROMPT, TOKENS)
            began = time.monotonic()
            seen.add(await client.ask(request), began, measured)

    await asyncio.sleep(max(0.0, start - time.monotonic()))
    async with aclosing(client), asyncio.TaskGroup() as group:
        for delay in delays:
            group.create_task(loop(delay))
    return seen
