"""A streaming client of any OpenAI-compatible endpoint, for all commands that use one."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from pagewire.services.cli.client.endpoint_errors import (
    EndpointError,
    clipped,
    reason,
    refusal,
    unreachable,
)
from pagewire.services.cli.client.endpoint_url import base_url, http_client, key_header, read_start
from pagewire.services.cli.client.openai_messages import Chunk, ModelList, Usage
from pagewire.services.cli.client.sse import EventParser
from pagewire.shared.base.errors import UNDECODABLE

logger = logging.getLogger(__name__)

BODY_END_TIMEOUT_S = 1.0  # after the answer has ended
MAX_ERROR_BYTES = 64 << 10
CHAT, COMPLETIONS = "/chat/completions", "/completions"

_TIMINGS = {"x-pagewire-timings": "1"}  # other servers pay no heed to it
_DONE = b"[DONE]"
_chunk = msgspec.json.Decoder(Chunk)


@dataclass
class Reply:
    """One answer and its timing; times are in seconds since the request was sent.

    Attributes:
        arrivals: arrival time of each chunk.
        counts: number of tokens in each chunk; 1 if the server sends no token ids.
        token_ids: ids of the tokens, if the server sends them.
        has_token_ids: the counts come from the server's token ids.
        timings: JSON of which workers computed it; empty if the server does not say so.
        seconds: time at which the answer ended.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("l"))
    token_ids: list[int] = field(default_factory=list)
    has_token_ids: bool = False
    timings: bytes = b""
    seconds: float = 0.0

    @property
    def ttft(self) -> float | None:
        """Time to first token; None if no token came."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens: counted by token ids, else from the usage, else one per chunk."""
        if not self.has_token_ids and self.usage is not None and self.usage.completion_tokens:
            return self.usage.completion_tokens
        return sum(self.counts)

    @property
    def cached_tokens(self) -> int | None:
        """Number of cached prompt tokens; None if the server does not report it."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first chunk; None if there is only one chunk."""
        if len(self.arrivals) < 2 or self.arrivals[-1] <= self.arrivals[0]:
            return None
        return (self.num_tokens - self.counts[0]) / (self.arrivals[-1] - self.arrivals[0])

    def token_times(self) -> list[float]:
        """Return each token's arrival time; tokens of one chunk arrive at the same time."""
        chunks = zip(self.arrivals, self.counts, strict=True)
        return [at for at, count in chunks for _ in range(count)]

    def gaps(self) -> list[float]:
        """Return the times between tokens; a chunk's tokens share the time before the chunk."""
        times = []
        for i in range(1, len(self.arrivals)):
            gap = (self.arrivals[i] - self.arrivals[i - 1]) / self.counts[i]
            times.extend([gap] * self.counts[i])
        return times

    def take(self, chunk: Chunk, now: float, *, keep_text: bool) -> str:
        """Add a chunk; return its text."""
        self.usage = chunk.usage or self.usage
        self.timings = bytes(chunk.timings) or self.timings
        text, count, has_ids = "", 0, False
        for choice in chunk.choices or ():
            text += choice.content
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.token_ids is not None:
                count, has_ids = count + len(choice.token_ids), True
                self.token_ids += choice.token_ids
        self.has_token_ids = self.has_token_ids or has_ids
        if not self.has_token_ids:
            count = 1 if text else 0
        if count:
            self.arrivals.append(now)
            self.counts.append(count)
        if keep_text:
            self.text += text
        return text


class ChunkReader:
    """Parses the body of a streamed answer, independent of the HTTP client.

    Read the body to its end: otherwise its connection cannot be used again.

    Attributes:
        is_done: `[DONE]` has come; the rest is skipped.
    """

    def __init__(self) -> None:
        self._parser = EventParser()
        self.is_done = False

    def feed(self, part: bytes) -> Iterator[Chunk]:
        """Yield each chunk that these bytes complete.

        Raises:
            EndpointError: an event is an error, or is not a chunk of an OpenAI stream.
        """
        if self.is_done:
            return
        for data in self._parser.feed(part):
            if data == _DONE:
                self.is_done = True
                return
            yield _decode(data)


@dataclass(frozen=True)
class Dialect:
    """Features of an endpoint beyond the oldest API.

    Attributes:
        usage: the endpoint can send a last chunk with the usage.
        extensions: the endpoint accepts `return_token_ids` and other fields of vLLM, SGLang and
            Pagewire.
    """

    usage: bool
    extensions: bool

    def body(self, base: Mapping[str, Any], extensions: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a streaming request; fields that are None are left out."""
        body: dict[str, Any] = {**base, "stream": True}
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.extensions:
            body |= {"return_token_ids": True, **extensions}
        return {name: value for name, value in body.items() if value is not None}


DIALECTS = (Dialect(True, True), Dialect(True, False), Dialect(False, False))


class OpenAIClient:
    """Client of one endpoint; an async context manager, or closed with `aclose`.

    Args:
        url: URL of the server, with or without `/v1`.
        api_key: sent with each request; None sends no key.
        timeout_s: a request fails if the server sends no byte for this time.
        keep_text: whether replies keep their text, in addition to `on_text`.
        asks_timings: whether replies have `timings`, from a server that has them.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout_s: float,
        keep_text: bool = True,
        asks_timings: bool = False,
    ) -> None:
        self.url = base_url(url)
        self._http = http_client(self.url, headers=key_header(api_key), timeout_s=timeout_s)
        self._keep_text = keep_text
        headers = _TIMINGS if asks_timings else {}
        self._headers = {"Content-Type": "application/json", **headers}
        self._dialect: Dialect | None = None

    async def aclose(self) -> None:
        """Close the HTTP connections to the server."""
        await self._http.aclose()

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def choose_model(self, wanted: str | None) -> str:
        """Return the wanted model, or the first one that the endpoint lists.

        Raises:
            EndpointError: the endpoint does not answer, or lists no model.
        """
        if wanted is not None:
            return wanted
        try:
            response = await self._http.get(f"{self.url}/models")
        except httpx.HTTPError as exc:
            raise unreachable(self.url, exc) from exc
        if not response.is_success:
            raise refusal(response.status_code, response.content)
        try:
            models = msgspec.json.decode(response.content, type=ModelList).data
        except UNDECODABLE as exc:
            raise EndpointError(f"{self.url}/models does not list models: {exc}", "models") from exc
        if not models:
            raise EndpointError(f"{self.url}/models lists none; name one with --model", "models")
        return models[0].id

    async def stream(
        self,
        path: str,
        base: Mapping[str, Any],
        extensions: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Send a request and return its answer after it has ended.

        If the endpoint refuses a field of the newer API, the request is sent again without it.
        Later requests use the fields that were accepted.

        Args:
            path: `CHAT` or `COMPLETIONS`.
            base: the body, without fields about streaming.
            extensions: fields for servers that know `return_token_ids`.
            on_text: called with each chunk of text when it arrives.

        Raises:
            EndpointError: there is no complete answer.
        """
        refusals = []
        for dialect in DIALECTS if self._dialect is None else (self._dialect,):
            body = dialect.body(base, extensions or {})
            try:
                reply = await self._attempt(path, body, on_text)
            except EndpointError as exc:
                if exc.status not in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
                    raise
                refusals.append(exc)
            else:
                self._dialect = dialect
                return reply
        raise refusals[0]

    async def _attempt(
        self, path: str, body: dict[str, Any], on_text: Callable[[str], None] | None
    ) -> Reply:
        reply = Reply()
        content = msgspec.json.encode(body)
        start = time.perf_counter()
        try:
            async with self._http.stream(
                "POST", self.url + path, content=content, headers=self._headers
            ) as response:
                if not response.is_success:
                    raise refusal(response.status_code, await read_start(response, MAX_ERROR_BYTES))
                reader = ChunkReader()
                parts = response.aiter_bytes()
                async for part in parts:
                    for chunk in reader.feed(part):
                        now = time.perf_counter() - start
                        text = reply.take(chunk, now, keep_text=self._keep_text)
                        if text and on_text is not None:
                            on_text(text)
                    if reader.is_done:
                        break
                reply.seconds = time.perf_counter() - start
                await _read_end(parts)
        except httpx.ConnectError as exc:
            raise unreachable(self.url, exc) from exc
        except httpx.TimeoutException as exc:
            raise EndpointError(f"{self.url} was silent for too long", "timeout") from exc
        except httpx.HTTPError as exc:
            raise EndpointError(f"the connection broke: {reason(exc)}", "connection") from exc
        if reply.finish_reason is None:
            raise EndpointError("the stream ended before the answer was complete", "cut off")
        return reply


def _decode(data: bytes) -> Chunk:
    try:
        chunk = _chunk.decode(data)
    except UNDECODABLE as exc:
        raise EndpointError(f"the stream is not OpenAI's: {exc}", "stream") from exc
    if chunk.error is not None:
        raise EndpointError(clipped(chunk.error.message), "stream error")
    return chunk


async def _read_end(parts: AsyncIterator[bytes]) -> None:
    """Read the rest of a body after its answer, so that its connection can be used again."""
    try:
        async with asyncio.timeout(BODY_END_TIMEOUT_S):
            async for _ in parts:
                pass
    except (TimeoutError, httpx.HTTPError) as exc:
        logger.debug("closing a connection instead of reusing it: %s", reason(exc))
