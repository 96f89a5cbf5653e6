"""The answers of a run: what is asked for, and what a client has of each answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from pagewire.services.cli.client.endpoint_errors import EndpointError
from pagewire.services.cli.client.endpoint_url import CONNECT_TIMEOUT_S
from pagewire.services.cli.client.openai_client import ChunkReader
from pagewire.services.cli.client.openai_messages import Chunk, Timings
from pagewire.shared.base.errors import UNDECODABLE

MODEL = "pagewire-demo"
MAX_TOKENS = 128
TEMPERATURE = 1.0
PROMPTS = (
    "Lambda expressions",
    "The import statement",
    "The with statement is used to",
)


@dataclass
class ProofAnswer:
    """The part of an answer that its client has received.

    Attributes:
        text: the text that has been streamed so far.
        token_ids: the tokens that have been streamed so far.
        times: when it was sent, and when tokens came, in seconds.
        migrations: how often the router moved it; known at its end.
        is_whole: whether the answer's last event has come.
        problem: why it ended too early.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    migrations: int = 0
    is_whole: bool = False
    problem: str = ""

    @property
    def longest_gap(self) -> float:
        """The longest time without a token, in seconds."""
        return max((after - before for before, after in pairwise(self.times)), default=0.0)


def body(index: int) -> dict[str, Any]:
    """Return the request for one answer: sampled, with a seed, of a known length."""
    return {
        "model": MODEL,
        "prompt": PROMPTS[index],
        "temperature": TEMPERATURE,
        "seed": index + 1,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "timings": True,
        "use_prefill_worker": True,
    }


class Reader:
    """Streams the answers of one run.

    Args:
        client: owned by the caller.
        url: of the endpoint, without a path.
        on_text: called with what is added to the first answer.

    Attributes:
        answers: in the order of `PROMPTS`.
    """

    def __init__(self, client: httpx.AsyncClient, url: str, on_text: Callable[[str], None]) -> None:
        self._client, self._url, self._on_text = client, f"{url}/v1/completions", on_text
        self.answers = [ProofAnswer() for _ in PROMPTS]
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of the first answer."""
        return self.answers[0].is_whole or bool(self.answers[0].problem)

    async def until(self, count: int) -> None:
        """Wait until the first answer has this number of tokens, or has ended."""
        while len(self.answers[0].token_ids) < count and not self.has_ended:
            self._changed.clear()
            await self._changed.wait()

    async def read(self, index: int) -> None:
        """Stream one answer; an error becomes its problem."""
        answer = self.answers[index]
        answer.times.append(time.monotonic())
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # the run has a limit
        try:
            async with self._client.stream(
                "POST", self._url, json=body(index), timeout=timeout
            ) as response:
                reader = ChunkReader()
                async for part in response.aiter_bytes():
                    for chunk in reader.feed(part):
                        self._take(index, chunk)
                    answer.is_whole = reader.is_done
        except EndpointError as exc:
            answer.problem = str(exc)
        except (httpx.HTTPError, *UNDECODABLE, IndexError) as exc:
            answer.problem = f"{type(exc).__name__}: {exc}"
        if not answer.is_whole:
            answer.problem = answer.problem or "its stream ended too early"
        self._changed.set()

    def _take(self, index: int, chunk: Chunk) -> None:
        answer = self.answers[index]
        if timings := bytes(chunk.timings):
            answer.migrations = msgspec.json.decode(timings, type=Timings).choices[0].migrations
        for choice in chunk.choices or ():
            if choice.token_ids:
                answer.token_ids += choice.token_ids
                answer.times.append(time.monotonic())
            if choice.content:
                answer.text += choice.content
                if index == 0:
                    self._on_text(choice.content)
        self._changed.set()
