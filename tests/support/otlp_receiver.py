"""A small OTLP collector: takes traces over HTTP, and keeps their spans."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from pagewire.tests.support.http_thread import QuietHandler, serving_http


class Received:
    """The spans that have come, with the service that sent each.

    Attributes:
        url: URL of the collector.
        spans: pairs of a service's name and a span.
        status: HTTP status of its answers; unless it is 200, spans are not kept.
        num_requests: number of requests that have come.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[tuple[str, Any]] = []
        self.status, self.num_requests = 200, 0

    def named(self, service: str, name: str) -> list[Any]:
        """Return a service's spans of a name."""
        return [span for who, span in self.spans if (who, span.name) == (service, name)]


@contextmanager
def otlp_receiver() -> Iterator[Received]:
    """Run a collector until the block ends."""

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                raw = gzip.decompress(raw)
            assert self.path == "/v1/traces"
            received.num_requests += 1
            if received.status != 200:
                self.send_error(received.status)
                return
            for of_service in ExportTraceServiceRequest.FromString(raw).resource_spans:
                names = {a.key: a.value.string_value for a in of_service.resource.attributes}
                for scope in of_service.scope_spans:
                    received.spans += [(names["service.name"], span) for span in scope.spans]
            body = ExportTraceServiceResponse().SerializeToString()
            self.answer(200, body, Content_Type="application/x-protobuf")

    with serving_http(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        received = Received(url)
        yield received
