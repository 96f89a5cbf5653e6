"""Measures how much KV requests hold by a system's own metric, and its tokens a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import httpx

from pagewire.loadtest.cluster import BenchError
from pagewire.loadtest.faults.players import Player
from pagewire.loadtest.faults.results import LEAST_SHARE, SentRequest
from pagewire.loadtest.faults.scenarios import PlannedRequest
from pagewire.loadtest.faults.system import KvUsage
from pagewire.loadtest.sampler import parse_metrics, samples_of
from pagewire.shared.base.errors import PagewireError
from pagewire.shared.metrics.pages import decode_targets

PROBE_INDEX = 2_000_000  # index of the first probing request; others have smaller ones
PROBE_TIMES = 2
NUDGE_TOKENS = 2
PAGE_TIMEOUT_S = 5.0
POLL_S = 0.5


def usage(pages: Iterable[str], kv: KvUsage) -> float | None:
    """Return the sum of a gauge's samples; None if no page has any.

    Args:
        pages: pages in Prometheus' text format.
        kv: names and labels of the gauge; the first name that occurs counts.
    """
    parsed = [parse_metrics(page) for page in pages]
    for metric in kv.metrics:
        samples = (samples_of(page, metric, **kv.labels).values() for page in parsed)
        values = list(chain.from_iterable(samples))
        if values:
            return sum(values)
    return None


class KvMeter:
    """Reads a system's KV usage.

    Args:
        kv: where it is reported.
        player: sends small requests before each reading, since some servers update their gauges
            only while they compute.
    """

    def __init__(self, kv: KvUsage, player: Player) -> None:
        self._kv, self._player = kv, player

    async def settled(self, most: float = 0.0) -> float:
        """Return the KV in use as soon as it is at most `most`, or what it is after the timeout.

        Raises:
            BenchError: the metric cannot be read.
        """
        deadline = time.monotonic() + self._kv.free_timeout_s
        while True:
            await self._nudge()
            try:
                used = await self._read()
            except (httpx.HTTPError, PagewireError, BenchError):
                if time.monotonic() > deadline:
                    raise
                used = None
            if used is not None and (used <= most + LEAST_SHARE or time.monotonic() > deadline):
                return used
            await asyncio.sleep(POLL_S)

    async def _read(self) -> float:
        async with httpx.AsyncClient(timeout=PAGE_TIMEOUT_S, trust_env=False) as http:
            urls = list(self._kv.pages)
            if self._kv.targets:
                answer = (await http.get(self._kv.targets)).raise_for_status()
                urls += [url for target in decode_targets(answer.content) for url in target.urls]
            answers = await asyncio.gather(*map(http.get, urls))
        used = usage((answer.raise_for_status().text for answer in answers), self._kv)
        if used is None:
            raise BenchError(f"no page has a metric {' or '.join(self._kv.metrics)}: {urls}")
        return used

    async def _nudge(self) -> None:
        number = 2 * max(1, len(self._kv.pages))
        requests = [
            PlannedRequest(PROBE_INDEX + i, 0.0, "long", NUDGE_TOKENS, 1) for i in range(number)
        ]
        await self._player.play(self._player.prepare(requests), time.monotonic())


@dataclass(frozen=True)
class Capacity:
    """Tokens per second of requests that were sent at once, and how many of them failed."""

    tokens_per_s: float
    failed: int
    error: str


async def measured_capacity(player: Player) -> Capacity:
    """Return the best capacity of a few times, with requests as long as the longest stream."""
    load, clients = player.load, player.settings.probe_clients
    best, failed = 0.0, list[SentRequest]()
    for time_number in range(PROBE_TIMES):
        first = PROBE_INDEX + clients * (1 + time_number)
        requests = [
            PlannedRequest(first + i, 0.0, "long", load.prompt_tokens.high, load.output_tokens.high)
            for i in range(clients)
        ]
        prepared = player.prepare(requests)
        began = time.monotonic()
        answers = await player.play(prepared, began)
        seconds = time.monotonic() - began
        failed += [sent for sent in answers if sent.status == "failed"]
        best = max(best, sum(len(sent.times) for sent in answers) / seconds)
    return Capacity(best, len(failed), failed[0].error if failed else "")
