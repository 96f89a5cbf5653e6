"""A streaming client of the chat endpoint that notes when each token arrives.

It reads answers as `pagewire bench` does; only the transport is of its own: locust's users are
greenlets, in which asyncio does not run. Knows nothing of locust: importing that patches the whole
process.
"""

from __future__ import annotations

import time

import requests

from pagewire.loadtest.cluster import key_headers
from pagewire.loadtest.records import MeasuredRequest
from pagewire.loadtest.workloads import Ask
from pagewire.services.cli.client.endpoint_errors import EndpointError, refusal
from pagewire.services.cli.client.openai_client import ChunkReader, Reply

PATH = "/v1/chat/completions"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
MAX_ERROR_CHARS = 200


class ChatClient:
    """One user's connection.

    Args:
        url: URL of the router, without a path.
        model: the name of the model that is asked.
    """

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url.rstrip("/") + PATH, model
        self._session = requests.Session()
        self._session.trust_env = False  # no proxies between us and what is measured
        self._session.headers.update(key_headers())

    def close(self) -> None:
        """Close the HTTP connection to the server."""
        self._session.close()

    def ask(self, ask: Ask, record: MeasuredRequest) -> str:
        """Send a request, read or cut its answer, and fill in the record.

        Errors go to the record. If the caller is interrupted the record stays "unfinished".

        Returns:
            The answer's text, empty after an error.
        """
        reply = Reply()
        began = time.perf_counter()
        try:
            record.outcome = "ok" if self._stream(ask, reply, began) else "cancelled"
        except (requests.RequestException, EndpointError) as exc:
            record.outcome = "error"
            record.error = f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]
        finally:
            record.end = time.perf_counter() - began
            record.token_times = reply.token_times()
            if reply.usage is not None:
                record.usage_prompt = reply.usage.prompt_tokens
                record.usage_completion = reply.usage.completion_tokens
                record.usage_cached = reply.cached_tokens
        return "" if record.outcome == "error" else reply.text

    def _stream(self, ask: Ask, reply: Reply, began: float) -> bool:
        """Read until the end, or until the client has had enough; then hang up.

        Returns:
            Whether the answer came to its end.
        """
        reader = ChunkReader()
        with self._session.post(
            self._url,
            json=ask.body(self._model),
            stream=True,
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        ) as response:
            if response.status_code != requests.codes.ok:
                raise refusal(response.status_code, response.content)
            for data in response.iter_content(None):
                at = time.perf_counter() - began
                for chunk in reader.feed(data):
                    reply.take(chunk, at, keep_text=True)
                if ask.cancel_after is not None and sum(reply.counts) >= ask.cancel_after:
                    return reader.is_done
        if not reader.is_done:
            raise EndpointError("the stream ended before the answer was complete", "cut off")
        return True
