"""Runs the load of a bench against an endpoint, with a bound on requests in flight."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from pagewire.services.cli.bench.load import (
    WORDS,
    Arrivals,
    TokenRatio,
    Workload,
    arrival_times,
    text_of,
)
from pagewire.services.cli.bench.stats import Results
from pagewire.services.cli.client.endpoint_errors import EndpointError
from pagewire.services.cli.client.openai_client import CHAT, OpenAIClient, Reply
from pagewire.shared.base.errors import ConfigError

PROBE_WORDS = (len(WORDS), 2 * len(WORDS))  # all words, once and twice, so that each counts alike
PAUSE_AFTER_ERROR_S = 0.1  # so that a server that refuses at once is not flooded
NOT_SENT = "not sent: in-flight limit"


@dataclass(frozen=True)
class RequestPace:
    """How fast requests start, and when the last one starts.

    Attributes:
        rate: requests per second, independent of the server's speed; None keeps `concurrency`
            requests running.
        max_in_flight: with a rate, requests beyond this number are not sent and count as failed.
        requests: upper bound on the number of requests.
        duration_s: no request starts later than this.
    """

    rate: float | None = None
    arrivals: Arrivals = "poisson"
    concurrency: int = 8
    max_in_flight: int = 1024
    requests: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True)
class EndpointTarget:
    """The endpoint, and the fields of all requests.

    Attributes:
        path: `CHAT` or `COMPLETIONS`.
        fields: fields of every request, in addition to prompt and length.
    """

    client: OpenAIClient
    path: str
    fields: dict[str, Any]

    async def ask(self, prompt: str, output_tokens: int) -> Reply:
        """Return the reply to one request.

        Raises:
            EndpointError: there is no complete reply.
        """
        base: dict[str, Any] = {**self.fields, "max_tokens": output_tokens}
        if self.path == CHAT:
            base["messages"] = [{"role": "user", "content": prompt}]
        else:
            base["prompt"] = prompt
        return await self.client.stream(self.path, base, {"ignore_eos": True})

    async def measure_ratio(self, seed: int) -> TokenRatio:
        """Send two requests to warm up, and learn the endpoint's dialect and how it counts tokens.

        Raises:
            EndpointError: the endpoint does not answer.
        """
        rng = random.Random(f"{seed}/probe")
        counts = []
        for words in PROBE_WORDS:
            reply = await self.ask(text_of(rng, words), 2)
            counts.append((words, 0 if reply.usage is None else reply.usage.prompt_tokens))
        return TokenRatio.measure(*counts)


class BenchRun:
    """One run of a load; used once.

    Attributes:
        results: the results so far.
        in_flight: number of requests in flight.
    """

    def __init__(
        self, target: EndpointTarget, workload: Workload, pace: RequestPace, results: Results
    ) -> None:
        if pace.requests is None and pace.duration_s is None:
            raise ConfigError("a bench needs an end: a number of requests, or a duration")
        self._target, self._workload, self._pace = target, workload, pace
        self._start = self._end = 0.0
        self.results, self.in_flight = results, 0

    @property
    def seconds(self) -> float:
        """Time from the start to the end of the last reply."""
        return self._end - self._start

    @property
    def progress(self) -> float:
        """Share of the load that is done, 0 to 1."""
        done = self.results.ok + self.results.failed
        by_count = done / self._pace.requests if self._pace.requests else 0.0
        now = time.perf_counter() - self._start if self._start else 0.0
        by_time = now / self._pace.duration_s if self._pace.duration_s else 0.0
        return min(1.0, max(by_count, by_time))

    async def run(self) -> None:
        """Send all requests and wait for the last reply. Cancelling it cancels the requests."""
        self._start = self._end = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._pace.rate is None:
                    for _ in range(self._pace.concurrency):
                        tasks.create_task(self._repeat())
                else:
                    await self._send_at_rate(tasks, self._pace.rate)
        finally:
            self._end = time.perf_counter()

    async def _repeat(self) -> None:
        """Send one request after another, as one user does."""
        while (index := self._next()) is not None:
            self.in_flight += 1
            if not await self._one(index):
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    async def _send_at_rate(self, tasks: asyncio.TaskGroup, rate: float) -> None:
        for offset in arrival_times(self._pace.arrivals, rate, self._workload.seed):
            if self._pace.duration_s is not None and offset >= self._pace.duration_s:
                return
            await asyncio.sleep(max(0.0, self._start + offset - time.perf_counter()))
            index = self._next()
            if index is None:
                return
            self.results.start_lag.add(max(0.0, time.perf_counter() - self._start - offset))
            if self.in_flight >= self._pace.max_in_flight:
                limit = f"{self._pace.max_in_flight} requests were under way"
                self.results.add_error(NOT_SENT, limit)
            else:
                self.in_flight += 1
                tasks.create_task(self._one(index))

    def _next(self) -> int | None:
        """Return the index of the next request, or None if enough were sent."""
        index, pace = self.results.sent, self._pace
        if pace.requests is not None and index >= pace.requests:
            return None
        if pace.duration_s is not None and time.perf_counter() - self._start >= pace.duration_s:
            return None
        self.results.sent += 1
        return index

    async def _one(self, index: int) -> bool:
        """Send a request that counts as in flight; return whether it was answered."""
        request = self._workload.request(index)
        try:
            reply = await self._target.ask(request.prompt, request.output_tokens)
        except EndpointError as exc:
            self.results.add_error(exc.kind, str(exc))
            return False
        else:
            self.results.add_reply(reply)
            return True
        finally:
            self.in_flight -= 1
