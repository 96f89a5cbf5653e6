"""Sends the requests of a batch, a bounded number at a time, and retries refused ones."""

from __future__ import annotations

import asyncio
import email.utils
import math
import random
import time
from collections.abc import Callable, Iterator

import httpx

from pagewire.services.cli.batch.lines import BatchRequest, OutputLine, answered, failed
from pagewire.services.cli.client.endpoint_errors import EndpointError, reason, refusal, unreachable
from pagewire.services.cli.client.endpoint_url import http_client, key_header, read_start, root_url

MAX_ANSWER_BYTES = 128 << 20
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
NOT_ALLOWED = (401, 403)  # no request with this key can succeed
UNAVAILABLE = (408, 429, 502, 503, 504)  # caused by the endpoint, not by the request


class _TryAgainError(Exception):
    """A request has no answer yet.

    Args:
        cause: the error to report if all retries fail.
        is_general: whether any other request would also fail.
        pause_s: how long the endpoint asks to wait, in seconds.
    """

    def __init__(self, cause: EndpointError, is_general: bool, pause_s: float = 0.0) -> None:
        super().__init__(str(cause))
        self.cause, self.is_general, self.pause_s = cause, is_general, pause_s


class BatchSender:
    """Sends requests to an endpoint; an async context manager.

    Args:
        url: URL of the server, with or without `/v1`.
        api_key: sent with each request; None sends no key.
        concurrency: number of requests in flight.
        timeout_s: a request is sent again if the server sends no byte for this time.
        retry_s: how long after its first failure a request may be sent again.

    Attributes:
        in_flight: number of requests in flight.
        waiting: number of requests that wait to be sent again.
        trouble: why the latest of them waits.
    """

    def __init__(
        self, url: str, api_key: str | None, concurrency: int, timeout_s: float, retry_s: float
    ) -> None:
        self.url = root_url(url)
        self._concurrency, self._retry_s = concurrency, retry_s
        self._http = http_client(
            self.url,
            headers={"Content-Type": "application/json", **key_header(api_key)},
            timeout_s=timeout_s,
            keep_alive=concurrency,
        )
        self.in_flight = self.waiting = 0
        self.trouble = ""

    async def __aenter__(self) -> BatchSender:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def send(
        self, requests: Iterator[BatchRequest], on_line: Callable[[OutputLine], None]
    ) -> None:
        """Send all requests. If cancelled, requests in flight get no output line.

        Args:
            requests: consumed one by one, when a request can be sent.
            on_line: called with the output line of each request, in the order in which they end.

        Raises:
            EndpointError: the endpoint refuses the key, its certificate is not trusted, or it has
                refused a request for `retry_s`.
        """

        async def send_next() -> None:
            for request in requests:
                on_line(await self._line_of(request))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._concurrency):
                    tasks.create_task(send_next())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first one cancelled the others

    async def _line_of(self, request: BatchRequest) -> OutputLine:
        """Send a request, and retry it, until it is answered or has finally failed."""
        pause_s, deadline = FIRST_PAUSE_S, math.inf
        while True:
            self.in_flight += 1
            try:
                return await self._attempt(request)
            except _TryAgainError as exc:
                again = exc
            finally:
                self.in_flight -= 1
            deadline = min(deadline, time.monotonic() + self._retry_s)
            left_s = deadline - time.monotonic()
            wait_s = max(again.pause_s, min(random.uniform(pause_s / 2, pause_s), left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if left_s <= 0 or wait_s > left_s:
                cause = again.cause
                if again.is_general:
                    message = f"{cause}; given up by --retry-for {self._retry_s:g}"
                    raise EndpointError(message, cause.kind, cause.status) from cause
                return failed(request, cause.kind, str(cause))
            await self._pause(wait_s, str(again))

    async def _pause(self, seconds: float, trouble: str) -> None:
        self.waiting, self.trouble = self.waiting + 1, trouble
        try:
            await asyncio.sleep(seconds)
        finally:
            self.waiting -= 1

    async def _attempt(self, request: BatchRequest) -> OutputLine:
        try:
            async with self._http.stream(
                "POST", self.url + request.url, content=request.body
            ) as response:
                body = await read_start(response, MAX_ANSWER_BYTES)
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            cause = unreachable(self.url, exc)
            if cause.kind == "certificate":
                raise cause from exc
            raise _TryAgainError(cause, is_general=True) from exc
        except httpx.TimeoutException as exc:
            silent = EndpointError(f"{self.url} was silent for too long", "timeout")
            raise _TryAgainError(silent, is_general=False) from exc
        except httpx.HTTPError as exc:
            cause = EndpointError(f"the connection broke: {reason(exc)}", "connection_error")
            raise _TryAgainError(cause, is_general=False) from exc
        status = response.status_code
        if status in NOT_ALLOWED:
            raise refusal(status, body)
        if status in UNAVAILABLE:
            pause_s = retry_after(response.headers.get("Retry-After", ""))
            raise _TryAgainError(refusal(status, body), is_general=True, pause_s=pause_s)
        if len(body) > MAX_ANSWER_BYTES:
            message = f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB"
            return failed(request, "answer_too_large", message)
        return answered(request, status, response.headers.get("x-request-id", ""), body)


def retry_after(value: str) -> float:
    """Return the seconds that a header `Retry-After` asks for; 0 if it asks for none."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return seconds if seconds > 0 else 0.0  # also for nan
