"""A streaming client of the chat endpoint that notes when each token arrives.

Knows nothing of locust: importing that patches the whole process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import requests

from pagewire.loadtest.records import RequestRecord
from pagewire.loadtest.workloads import Ask

PATH = "/v1/chat/completions"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
MAX_EVENT_BYTES = 1 << 20
MAX_ERROR_CHARS = 200


class StreamError(Exception):
    """The server refused the request, or the stream is not what it should be."""


class EventDecoder:
    """Splits a byte stream into server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is complete by now.

        Raises:
            StreamError: an event has no end.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for event in events:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ")


@dataclass
class Answer:
    """What has arrived of an answer.

    Attributes:
        record: gets the measurements.
        text: of all chunks, in order.
        is_done: the stream ended as it should.
    """

    record: RequestRecord
    text: list[str] = field(default_factory=list)
    is_done: bool = False

    def take(self, event: bytes, at: float) -> None:
        """Take up an event that arrived `at` seconds after the request was sent.

        Raises:
            StreamError: it is an error, or nothing that is known.
        """
        if event == b"[DONE]":
            self.is_done = True
            return
        chunk = _decode(event)
        if "error" in chunk:
            raise StreamError(_message(chunk))
        for choice in chunk.get("choices", ()):
            self.text.append(choice["delta"].get("content") or "")
            self.record.token_times += [at] * len(choice.get("token_ids", ()))
        if chunk.get("usage"):
            self._take_usage(chunk["usage"])

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.record.usage_prompt = usage["prompt_tokens"]
        self.record.usage_completion = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        self.record.usage_cached = details.get("cached_tokens")


class ChatClient:
    """One user's connection.

    Args:
        url: of the router, without a path.
        model: that is asked.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url.rstrip("/") + PATH, model
        self._session = requests.Session()
        self._session.trust_env = False  # no proxies between us and what is measured

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def ask(self, ask: Ask, record: RequestRecord) -> str:
        """Send a request, read or cut its answer, and fill in the record.

        Errors go to the record. If the caller is interrupted the record stays "unfinished".

        Returns:
            The answer's text, empty after an error.
        """
        answer = Answer(record)
        began = time.perf_counter()
        try:
            self._stream(ask, answer, began)
            record.outcome = "ok" if answer.is_done else "cancelled"
        except (requests.RequestException, StreamError) as exc:
            record.outcome = "error"
            record.error = f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]
        finally:
            record.end = time.perf_counter() - began
        return "" if record.outcome == "error" else "".join(answer.text)

    def _stream(self, ask: Ask, answer: Answer, began: float) -> None:
        """Read until the end, or until the client has had enough; then hang up."""
        decoder = EventDecoder()
        with self._session.post(
            self._url,
            json=ask.body(self._model),
            stream=True,
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        ) as response:
            if response.status_code != requests.codes.ok:
                raise StreamError(f"status {response.status_code}: {_message(response.content)}")
            for data in response.iter_content(None):
                at = time.perf_counter() - began
                for event in decoder.feed(data):
                    answer.take(event, at)
                if _has_enough(ask, answer):
                    return
        if not answer.is_done:
            raise StreamError("the stream broke off")


def _has_enough(ask: Ask, answer: Answer) -> bool:
    return ask.cancel_after is not None and len(answer.record.token_times) >= ask.cancel_after


def _decode(event: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError as exc:
        raise StreamError(f"not JSON: {event[:80]!r}") from exc
    if not isinstance(chunk, dict):
        raise StreamError(f"not an object: {event[:80]!r}")
    return chunk


def _message(body: bytes | dict[str, Any]) -> str:
    """Return what an error body of OpenAI's form says."""
    if isinstance(body, bytes):
        try:
            return _message(_decode(body))
        except StreamError:
            return repr(body[:80])
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else str(error)
