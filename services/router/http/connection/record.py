"""Collects what the router knows about one HTTP request, for the log line at its end."""

from __future__ import annotations

import time
from functools import lru_cache
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Any, Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from pagewire.services.router.http.api.openai.answer_set import AnswerSet, EmbeddingAnswers
from pagewire.services.router.http.api_errors import CLIENT_CLOSED_REQUEST, SERVER_ERROR
from pagewire.shared.base.tracing import Attributes, TracedSpan, Tracing
from pagewire.shared.http.request_id import request_id_of

MAX_PATH_CHARS = 200
MAX_ERROR_CHARS = 500

# refused: the request was invalid, or there was no room or no worker. cancelled: the client left.
# failed: the server's fault, perhaps within a stream. cut: still running after the drain time.
Outcome = Literal["ok", "refused", "cancelled", "failed", "cut"]

RECORD = "pagewire.request"


Answers = AnswerSet | EmbeddingAnswers


class RequestRecord:
    """Facts about an HTTP request that are collected for its log line, span and metrics.

    Attributes:
        request_id: from the client's header, or made by the router.
        key: name of its API key; None if it has none.
        status: status of the response; 0 if there is no response.
        has_events: the response is a stream of events.
        outcome: how it ended; None if the status decides that.
        error: the error, for the log.
        answers: the request's answers; None if it ended before there were any.
        span: the request's span; None before its answers begin, or if it is not traced.
    """

    def __init__(self, scope: Scope) -> None:
        self.request_id = request_id_of(scope["headers"])
        self.scope, self.start = scope, time.monotonic()
        self.key: str | None = None
        self.status, self.has_events = 0, False
        self.outcome: Outcome | None = None
        self.error: str | None = None
        self.answers: Answers | None = None
        self.span: TracedSpan | None = None

    @property
    def owner(self) -> str:
        """The name of the API key, or else the client's address; owners take turns.

        Of an IPv6 address it is the first half: one machine may have all addresses of a network.
        """
        if self.key is not None:
            return self.key
        client = self.scope.get("client")
        return _network_of(client[0] if client else "::")

    def fail(self, exc: Exception, outcome: Outcome | None = None) -> None:
        """Record an error. If no outcome is given, the status decides it."""
        self.error, self.outcome = repr(exc)[:MAX_ERROR_CHARS], outcome or self.outcome

    def begin_span(self, tracing: Tracing) -> str | None:
        """Begin the request's span, a child of the client's; return it as W3C's `traceparent`."""
        headers, ago_s = Headers(scope=self.scope), time.monotonic() - self.start
        parent, state = headers.get("traceparent"), headers.get("tracestate")
        name = f"POST {self.scope['path']}"[:MAX_PATH_CHARS]
        self.span = tracing.start(name, parent, state, ago_s=ago_s)
        return None if self.span is None else self.span.trace

    def end_span(self) -> None:
        """End the request's span, if it has one."""
        if self.span is None:
            return
        about: Attributes = {
            "http.response.status_code": self.status,
            "pagewire.request_id": self.request_id,
            "pagewire.outcome": self.final_outcome,
        }
        if self.answers is not None:
            usage = self.answers.usage
            about["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            about["gen_ai.usage.output_tokens"] = usage.completion_tokens
            about["pagewire.cached_tokens"] = usage.cached_tokens
            if (first := self.answers.first_token_at) is not None:
                about["pagewire.first_token_s"] = first - self.start
        self.span.end(about, self.error if self.final_outcome in ("failed", "cut") else None)

    @property
    def final_outcome(self) -> Outcome:
        """How the request ended, by its status if nothing else recorded an outcome."""
        if self.outcome is not None:
            return self.outcome
        if self.status in (0, CLIENT_CLOSED_REQUEST):
            return "cancelled"
        if self.status < 400:
            return "ok"
        return "failed" if self.status == SERVER_ERROR else "refused"

    def fields(self) -> dict[str, Any]:
        """Return the log line's fields. The URL's query, which may hold a secret, is left out."""
        scope, now = self.scope, time.monotonic()
        path, client = scope.get("raw_path", b"")[:MAX_PATH_CHARS], scope.get("client")
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": path.partition(b"?")[0].decode("ascii", "backslashreplace"),
            "status": self.status,
            "outcome": self.final_outcome,
            "client": client[0] if client else "-",
        }
        if self.key is not None:
            fields["key"] = self.key
        if self.answers is not None:
            fields |= self._fields_of(self.answers)
        fields["duration_s"] = round(now - self.start, 6)
        if self.error is not None:
            fields["error"] = self.error
        return fields

    def _fields_of(self, answers: Answers) -> dict[str, Any]:
        usage, first = answers.usage, answers.first_token_at
        fields: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if first is not None:
            fields["ttft_s"] = round(first - self.start, 6)
        return fields | {"finish": answers.finish_reasons, "workers": answers.workers}


@lru_cache(1024)
def _network_of(host: str) -> str:
    """Return an IPv4 address as it is, and the first half of an IPv6 address."""
    address = ip_address(host)
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ip_network((int(address), 64), strict=False))


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request that came through `AccessLog` (access_log.py)."""
    record: RequestRecord = scope[RECORD]
    return record
