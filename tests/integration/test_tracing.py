"""The end of a service's spans: what is left is sent, and no collector holds the service up."""

from __future__ import annotations

import socket
import threading

from pagewire.services.cli.up.cluster import LEAVE_S
from pagewire.shared.tracing import MAX_QUEUED_SPANS, Tracing, open_tracing
from pagewire.tests.support.otlp_receiver import otlp_receiver


def tracing_with_spans(url: str, count: int) -> Tracing:
    tracing = open_tracing(url, "router", "r")
    assert tracing is not None
    for _ in range(count):
        span = tracing.start("a request", None)
        assert span is not None
        span.end({})
    return tracing


def test_spans_that_are_left_at_the_end_are_sent() -> None:
    with otlp_receiver() as collector:
        tracing_with_spans(collector.url, 10).close()
        assert len(collector.named("pagewire-router", "a request")) == 10


def test_a_collector_that_never_answers_does_not_hold_a_service_up() -> None:
    """`pagewire up` kills a service that has not left within `LEAVE_S`."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracing = tracing_with_spans(url, MAX_QUEUED_SPANS)
        closing = threading.Thread(target=tracing.close, daemon=True)
        closing.start()
        closing.join(LEAVE_S)
        assert not closing.is_alive()
