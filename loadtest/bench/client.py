"""A client that asks for completions of random prompts and records when each token arrives.

It extends the client of `pagewire bench` for these benches: several endpoints in turn, random
prompts that are encoded before the timing starts, vLLM's prefill on another server, and gaps of 0
between tokens of one chunk, as in the published tables.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from pagewire.loadtest.bench.shapes import VOCAB_USED, random_prompts
from pagewire.loadtest.cluster import BenchError, metrics_near
from pagewire.loadtest.sampler import samples_of
from pagewire.services.cli.client.endpoint_errors import EndpointError
from pagewire.services.cli.client.endpoint_url import IDLE_S
from pagewire.services.cli.client.openai_client import COMPLETIONS, OpenAIClient

REQUEST_TIMEOUT_S = 120.0


@dataclass(slots=True)
class TimedAnswer:
    """An answer, and when its tokens arrived.

    Attributes:
        times: arrival times of its tokens, in seconds from the request.
        tokens: ids of its tokens.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to the first token in seconds."""
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        """Times between tokens in seconds; tokens that came together have gaps of 0."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """The body of a request.

    Attributes:
        prompt: token ids of the prompt, as JSON.
        options: the other fields of the body.
    """

    prompt: msgspec.Raw
    options: dict[str, Any]

    def fields(self, **more: Any) -> dict[str, Any]:
        """Return the body to send, with added or replaced fields."""
        return {"prompt": self.prompt, **self.options, **more}


class Client:
    """Sends requests to the endpoints in turn.

    Args:
        urls: URLs of the endpoints.
        prefill_url: URL of a vLLM server that computes each prompt first; None without one.
        model: name under which the endpoints serve the model.
        vocab: upper bound (exclusive) of token ids in prompts.
        seed: of the prompts.
    """

    def __init__(
        self,
        urls: list[str],
        prefill_url: str | None = None,
        *,
        model: str = "m",
        vocab: int = VOCAB_USED,
        seed: int = 0,
    ) -> None:
        self._urls, self._prefill_url, self._turn = urls, prefill_url, 0
        self._clients = [
            OpenAIClient(url, timeout_s=REQUEST_TIMEOUT_S, keep_text=False) for url in urls
        ]
        self._model, self._vocab = model, vocab
        self._rng = random.Random(seed)
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits)

    async def aclose(self) -> None:
        """Close the HTTP connections to the server."""
        await self._http.aclose()
        for client in self._clients:
            await client.aclose()

    async def transfer_seconds(self) -> tuple[float, float]:
        """Return sum and count so far of the times from a first token until its KV has arrived.

        They are 0 if the endpoint does not measure them.

        Raises:
            BenchError: the server does not answer.
        """
        try:
            values = await asyncio.to_thread(metrics_near, self._urls[0])
        except OSError as exc:
            raise BenchError(f"no metrics of {self._urls[0]}: {exc}") from exc
        name = "pagewire_request_transfer_seconds"
        seconds, count = (
            sum(samples_of(values, f"{name}_{part}").values()) for part in ("sum", "count")
        )
        return seconds, count

    def prepare(self, length: int, out: int, **more: Any) -> CompletionRequest:
        """Return a request with a random prompt, and with more fields in its body.

        For a long prompt this takes milliseconds, in which no other stream is read. So make such
        requests before other streams are measured.
        """
        [prompt] = random_prompts(self._rng, 1, length, self._vocab)
        options = {"model": self._model, "max_tokens": out, "temperature": 0, "ignore_eos": True}
        return CompletionRequest(msgspec.Raw(msgspec.json.encode(prompt)), options | more)

    async def complete(self, length: int, out: int, **more: Any) -> TimedAnswer:
        """Send a request with a new random prompt; see `prepare` and `ask`."""
        return await self.ask(self.prepare(length, out, **more))

    async def ask(self, request: CompletionRequest) -> TimedAnswer:
        """Stream one answer; a chunk of k tokens counts as k tokens at once.

        Raises:
            BenchError: the request failed, or the number of tokens is wrong.
        """
        which = self._turn % len(self._urls)
        self._turn += 1
        more = {}
        start = time.perf_counter()
        try:
            if self._prefill_url is not None:
                more["kv_transfer_params"] = await self._prefill_first(self._prefill_url, request)
            prefill_s = time.perf_counter() - start
            reply = await self._clients[which].stream(COMPLETIONS, request.fields(**more))
        except (httpx.HTTPError, EndpointError, KeyError, ValueError) as exc:
            raise BenchError(f"{self._urls[which]}: {exc!r}") from exc
        out = request.options["max_tokens"]
        if len(reply.token_ids) != out:
            raise BenchError(f"{len(reply.token_ids)} tokens came, not {out}")
        return TimedAnswer([prefill_s + at for at in reply.token_times()], reply.token_ids)

    async def _prefill_first(self, url: str, request: CompletionRequest) -> Any:
        """Have vLLM compute a prompt and keep its KV for another server; return where it is."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        fields = {"max_tokens": 1, "kv_transfer_params": wanted | dict.fromkeys(names)}
        body = msgspec.json.encode(request.fields(**fields))
        headers = {"Content-Type": "application/json"}
        response = await self._http.post(f"{url}/v1/completions", content=body, headers=headers)
        if response.status_code != httpx.codes.OK:
            raise BenchError(response.text)
        return response.json()["kv_transfer_params"]
