"""Sends the requests of a run, each by a client of its own that notes when tokens arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pagewire.loadtest.faults.results import SentRequest
from pagewire.loadtest.faults.scenarios import (
    BenchmarkSettings,
    PlannedRequest,
    ScenarioLoad,
    prompt_of,
)
from pagewire.services.cli.bench.load import TokenRatio
from pagewire.services.cli.client.endpoint_errors import EndpointError
from pagewire.services.cli.client.openai_client import COMPLETIONS, OpenAIClient

RETRY_AFTER_S = 0.5
REQUEST_TIMEOUTS = 4  # a request fails after this many times the timeout, whatever arrives
MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class Prepared:
    """A planned request and the body that is sent."""

    request: PlannedRequest
    body: dict[str, Any]


@dataclass(frozen=True)
class Player:
    """Sends planned requests to one endpoint.

    Attributes:
        client: client of the endpoint.
        model: model to request.
        vocab: token ids in prompts are below this; 0: prompts are text.
        ratio: how the endpoint counts the tokens of a text.
        load: size of the load; has the sampling temperature.
        settings: how the benchmark runs: its seed, the client's timeout, retries.
    """

    client: OpenAIClient
    model: str
    vocab: int
    ratio: TokenRatio
    load: ScenarioLoad
    settings: BenchmarkSettings

    def prepare(self, requests: Sequence[PlannedRequest]) -> list[Prepared]:
        """Return requests with their bodies: long prompts take milliseconds to make."""
        return [Prepared(request, self._body(request)) for request in requests]

    async def play(self, requests: Sequence[Prepared], began: float) -> list[SentRequest]:
        """Send requests at their times and return what became of them, in their order.

        Args:
            requests: what to send.
            began: start of the run, by `time.monotonic`.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send(request, began)) for request in requests]
        return [task.result() for task in tasks]

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        prompt = prompt_of(request, self.vocab, self.ratio, self.settings.seed)
        body = {
            "model": self.model,
            "prompt": msgspec.Raw(msgspec.json.encode(prompt)),
            "max_tokens": request.output_tokens,
            "temperature": self.load.temperature,
        }
        return body | ({"seed": request.index} if self.load.temperature else {})

    async def _send(self, prepared: Prepared, began: float) -> SentRequest:
        await asyncio.sleep(began + prepared.request.at - time.monotonic())
        sent = await self._attempt(prepared)
        for retry in range(self.settings.retries):
            if sent.status != "failed":
                break
            await asyncio.sleep(RETRY_AFTER_S)
            sent = await self._attempt(prepared)
            sent.retries = retry + 1
        return sent

    async def _attempt(self, prepared: Prepared) -> SentRequest:
        request = prepared.request
        sent, start = SentRequest(request), time.monotonic()
        longest = self.settings.timeout_s * REQUEST_TIMEOUTS
        limit = longest if request.stay_s is None else request.stay_s

        def record_arrival(_text: str) -> None:
            sent.times.append(time.monotonic() - start)

        try:
            async with asyncio.timeout(limit):
                reply = await self.client.stream(
                    COMPLETIONS, prepared.body, {"ignore_eos": True}, record_arrival
                )
        except TimeoutError:
            sent.status = "failed" if request.stay_s is None else "left"
            sent.kind = sent.error = f"no end after {limit:g} s"
        except EndpointError as exc:
            sent.kind, sent.error = exc.kind, str(exc)[:MAX_ERROR_CHARS]
        else:
            sent.status, sent.text = "ok", reply.text
            sent.token_ids, sent.times = reply.token_ids, reply.token_times()
        sent.end = time.monotonic() - start
        return sent
