"""Clients that ask for completions of random prompts and note when each token comes."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from pagewire.loadtest.bench.clusters import BenchError
from pagewire.loadtest.bench.engine import VOCAB_USED

REQUEST_TIMEOUT_S = 120.0
_JSON = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Answer:
    """One answer.

    Attributes:
        times: of its tokens' arrivals, in seconds from the request.
        tokens: their ids.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.times[0]

    @property
    def gaps(self) -> list[float]:
        """Times between tokens; tokens that came together have gaps of 0."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked.

    Attributes:
        prompt: its token ids, as JSON.
        options: the other fields.
    """

    prompt: str
    options: dict[str, Any]

    def body(self, more: dict[str, Any]) -> str:
        """Return the JSON to send, with further fields or others instead."""
        return f'{{"prompt": {self.prompt}, {json.dumps(self.options | more)[1:]}'


class Client:
    """Asks the endpoints in turn.

    Args:
        urls: of endpoints.
        prefill_url: of a vLLM server that is to compute each prompt first.
        model: the name under which they serve it.
        vocab: prompts are of token ids below.
    """

    def __init__(
        self,
        urls: list[str],
        prefill_url: str | None = None,
        *,
        model: str = "m",
        vocab: int = VOCAB_USED,
    ) -> None:
        self._urls, self._prefill_url, self._turn = urls, prefill_url, 0
        self._model, self._vocab = model, vocab
        self._rng = random.Random(0)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def transfer_seconds(self) -> tuple[float, float]:
        """Return sum and count so far of what KV took after first tokens; zeros elsewhere.

        Raises:
            BenchError: the server does not answer.
        """
        with _bench_errors(self._urls[0]):
            text = (await self._http.get(f"{self._urls[0]}/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        name = "pagewire_request_transfer_seconds"
        seconds, count = (
            sum(float(v) for k, v in values.items() if k.startswith(f"{name}_{part}"))
            for part in ("sum", "count")
        )
        return seconds, count

    def prepare(self, length: int, out: int) -> Request:
        """Make up a request with a prompt of its own.

        That of a long prompt takes milliseconds, in which no token of another answer is seen: who
        measures others meanwhile does it ahead.
        """
        prompt = [self._rng.randrange(10, self._vocab) for _ in range(length)]
        options = {"model": self._model, "max_tokens": out, "temperature": 0, "ignore_eos": True}
        return Request(json.dumps(prompt), options)

    async def complete(self, length: int, out: int) -> Answer:
        """Ask with a prompt that is made up now; see `ask`."""
        return await self.ask(self.prepare(length, out))

    async def ask(self, request: Request) -> Answer:
        """Stream one answer; a chunk of k tokens counts as k tokens at once.

        Raises:
            BenchError: an error, or another number of tokens than asked for.
        """
        stream = {"stream": True, "return_token_ids": True}
        url = self._urls[self._turn % len(self._urls)]
        self._turn += 1
        answer = Answer()
        start = time.perf_counter()
        with _bench_errors(url):
            if self._prefill_url is not None:
                stream["kv_transfer_params"] = await self._prefill_first(self._prefill_url, request)
            async for chunk in self._events(url, request.body(stream)):
                now = time.perf_counter() - start
                if "choices" not in chunk:
                    raise BenchError(f"{url} answered {chunk}")
                for choice in chunk["choices"]:
                    tokens = choice.get("token_ids") or ()
                    answer.times.extend([now] * len(tokens))
                    answer.tokens.extend(tokens)
        out = request.options["max_tokens"]
        if len(answer.times) != out:
            raise BenchError(f"{len(answer.times)} tokens came, not {out}")
        return answer

    async def _prefill_first(self, url: str, request: Request) -> Any:
        """Have a prompt computed and held for another server; returns where it is held."""
        wish = {"do_remote_decode": True, "do_remote_prefill": False}
        names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        ticket = {"max_tokens": 1, "kv_transfer_params": wish | dict.fromkeys(names)}
        response = await self._http.post(
            f"{url}/v1/completions", content=request.body(ticket), headers=_JSON
        )
        if response.status_code != httpx.codes.OK:
            raise BenchError(response.text)
        return response.json()["kv_transfer_params"]

    async def _events(self, url: str, body: str) -> AsyncIterator[dict[str, Any]]:
        url = f"{url}/v1/completions"
        async with self._http.stream("POST", url, content=body, headers=_JSON) as response:
            if response.status_code != httpx.codes.OK:
                raise BenchError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])


@contextmanager
def _bench_errors(url: str) -> Iterator[None]:
    """Turn what goes wrong with a server into errors that end a bench in order."""
    try:
        yield
    except (httpx.HTTPError, KeyError, ValueError) as exc:
        raise BenchError(f"{url}: {exc!r}") from exc
