"""Measures a serving cluster: unloaded TTFT, and token gaps under long prompts."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from pagewire.loadtest.bench.client import Client
from pagewire.loadtest.bench.tables import spread
from pagewire.loadtest.cluster import BenchError
from pagewire.services.cli.bench.stats import percentile

UNLOADED_PROMPTS = (128, 1024, 4096, 8192)
UNLOADED_TIMES = 7
UNLOADED_TOKENS = 32
STREAMS = 8
STREAM_PROMPT, STREAM_TOKENS = 1024, 1000
FIRST_GAPS = 64  # skipped gaps of a stream, in which other streams' prompts are computed
ISOLATION_TIMES = 3
LONG_PROMPT = 8192
LONG_PROMPTS_PER_S = 2.0
MOST_LONG_PROMPTS = 128

Row = dict[str, Any]


async def unloaded(client: Client) -> list[Row]:
    """Measure requests one at a time: TTFT, the gap after the first token, the usual gap, in ms.

    `exposed` is the mean time from the first token until the prompt's KV has arrived.

    Raises:
        BenchError: a request failed, or the server does not answer.
    """
    rows = []
    for length in UNLOADED_PROMPTS:
        for _ in range(2):
            await client.complete(length, UNLOADED_TOKENS)
        before = await client.transfer_seconds()
        answers = [await client.complete(length, UNLOADED_TOKENS) for _ in range(UNLOADED_TIMES)]
        after = await client.transfer_seconds()
        rows.append(
            {
                "what": "unloaded",
                "prompt": length,
                **spread("ttft", [answer.ttft * 1e3 for answer in answers]),
                "exposed": (after[0] - before[0]) / max(1, after[1] - before[1]) * 1e3,
                "second": statistics.median(answer.gaps[0] for answer in answers) * 1e3,
                "usual": statistics.median(gap for a in answers for gap in a.gaps[1:]) * 1e3,
            }
        )
    return rows


async def isolation(client: Client) -> list[Row]:
    """Measure gaps of some streams in ms, alternately alone and while long prompts arrive.

    Raises:
        BenchError: a request failed, or the streams last longer than the prepared prompts.
    """
    runs: dict[bool, list[list[float]]] = {False: [], True: []}
    long: list[float] = []
    for _ in range(ISOLATION_TIMES):
        for loaded in (False, True):
            gaps, ttft = await streams(client, loaded)
            runs[loaded].append(gaps)
            long += ttft
    alone, under_load = isolation_row(runs[False]), isolation_row(runs[True])
    more = {"of_alone": under_load["p99"] / alone["p99"], "long_ttft": statistics.median(long)}
    return [{"loaded": False, **alone}, {"loaded": True, **under_load, **more}]


async def streams(client: Client, loaded: bool, **more: Any) -> tuple[list[float], list[float]]:
    """Return the gaps of streams that start together, and TTFT of the long prompts, all in ms.

    Args:
        client: of the endpoints.
        loaded: long prompts arrive meanwhile.
        more: fields of the streams' requests.
    """
    long_requests = [client.prepare(LONG_PROMPT, 2) for _ in range(MOST_LONG_PROMPTS * loaded)]
    tasks = [
        asyncio.create_task(client.complete(STREAM_PROMPT, STREAM_TOKENS, **more))
        for _ in range(STREAMS)
    ]
    disturbers = []
    await asyncio.sleep(0.5)  # let the streams' own prompts be computed first
    while loaded and not all(task.done() for task in tasks):
        if not long_requests:
            raise BenchError(f"the streams last longer than {MOST_LONG_PROMPTS} prompts")
        disturbers.append(asyncio.create_task(client.ask(long_requests.pop())))
        await asyncio.sleep(1 / LONG_PROMPTS_PER_S)
    answers = await asyncio.gather(*tasks)
    ttft = [answer.ttft * 1e3 for answer in await asyncio.gather(*disturbers)]
    return [gap * 1e3 for answer in answers for gap in answer.gaps[FIRST_GAPS:]], ttft


def isolation_row(runs: list[list[float]]) -> Row:
    """Return percentiles over the gaps of all runs, and each run's p99."""
    gaps = [gap for run in runs for gap in run]
    return {
        "what": "isolation",
        "p50": percentile(gaps, 50),
        "p99": percentile(gaps, 99),
        "max": max(gaps),
        "p99_of_runs": [percentile(run, 99) for run in runs],
    }


async def run(client: Client, names: Sequence[str]) -> list[Row]:
    """Run the phases of these names, one after the other, and close the client."""
    rows: list[Row] = []
    async with aclosing(client):
        if "unloaded" in names:
            rows += await unloaded(client)
        if "isolation" in names:
            rows += await isolation(client)
    return rows
