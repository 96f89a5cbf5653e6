"""The end of a service's spans: what is left is sent, and no collector holds the service up."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

import pytest

from pagewire.services.cli.up.cluster import LEAVE_S
from pagewire.shared.base.tracing import MAX_QUEUED_SPANS, Tracing, open_tracing
from pagewire.tests.support.aio import eventually, run_async
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


def test_a_collector_that_refuses_is_reported_once_until_it_works_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # ms between two exports
    caplog.set_level(logging.INFO)

    async def send_until(tracing: Tracing, condition: Callable[[], bool]) -> None:
        while not condition():
            span = tracing.start("a request", None)
            assert span is not None
            span.end({})
            await asyncio.sleep(0.01)

    async def main() -> None:
        tracing = tracing_with_spans(collector.url, 1)
        for _ in range(2):
            caplog.clear()
            collector.status = 400
            refused = collector.num_requests + 5
            await send_until(tracing, lambda: collector.num_requests >= refused)  # noqa: B023
            lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
            assert len(lines) == 2, caplog.text  # the SDK's with the reason, and ours
            assert f"cannot export spans to {collector.url}" in caplog.text
            collector.status = 200
            await send_until(tracing, lambda: "exporting spans again" in caplog.text)
        await asyncio.to_thread(tracing.close)

    with otlp_receiver() as collector:
        run_async(main())


def test_a_clients_malformed_trace_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with otlp_receiver() as collector:
        tracing = open_tracing(collector.url, "router", "r")
        assert tracing is not None
        parent = f"00-{'a' * 32}-{'b' * 16}-01"
        for trace, state in ((parent, f"a=b,c={'d' * 600},\n"), ("00-zzz", "=,=")):
            span = tracing.start("a request", trace, state)
            assert span is not None
            span.end({})
        tracing.close()
        first, second = collector.named("pagewire-router", "a request")
    assert (first.trace_id.hex(), second.parent_span_id) == ("a" * 32, b"")
    assert not caplog.records


def test_a_collector_that_never_answers_does_not_hold_a_service_up() -> None:
    """`pagewire up` kills a service that has not left within `LEAVE_S`."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracing = tracing_with_spans(url, MAX_QUEUED_SPANS)
        closing = threading.Thread(target=tracing.close, daemon=True)
        closing.start()
        closing.join(LEAVE_S)
        assert not closing.is_alive()
    run_async(eventually(lambda: not spans_are_sent(), 20))


def spans_are_sent() -> bool:
    """Whether a thread of the SDK runs."""
    return any(each.name.startswith("OtelBatch") for each in threading.enumerate())
