"""OpenTelemetry spans of requests, over router, decode worker and prefill worker.

    router (server) --Generate.trace--> decode --Prefill.trace--> prefill
                                          +--> transfer

A service has a `Tracing` if an OTLP endpoint is set, and imports OpenTelemetry only then. Spans
exist only for sampled traces. A thread of the SDK exports them over HTTP in batches, from a bounded
queue; spans that do not fit are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.base.installing import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace import Span as SdkSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 2048
EXPORT_TIMEOUT_S = 5.0
FLUSH_S = 2.0  # at the end of a service
Attributes = dict[str, str | int | float | bool]


class TracedSpan:
    """A span that has not ended. Its methods may be called from any thread.

    Attributes:
        trace: the W3C `traceparent` for its children.
    """

    __slots__ = ("_span", "_tracing", "trace")

    def __init__(self, tracing: Tracing, span: SdkSpan) -> None:
        self._tracing, self._span = tracing, span
        context = span.get_span_context()
        self.trace = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        )

    def record_child(self, name: str, duration_s: float, attributes: Attributes) -> None:
        """Add a child span of this duration, in seconds, that ends now."""
        child = self._tracing.start(name, self.trace, ago_s=duration_s)
        if child is not None:
            child.end(attributes)

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """End it, now. Idempotent.

        Args:
            attributes: what is known of it at the end.
            error: why it failed; None if it has not.
        """
        if not self._span.is_recording():
            return
        self._span.set_attributes(attributes)
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Tracing:
    """The spans of one service's process. Make it with `open_tracing`.

    Args:
        provider: of the SDK.
        exporter: that the provider sends spans with.
        is_server: its spans begin at a client's request; else at a message of a service.
    """

    def __init__(
        self, provider: TracerProvider, exporter: _ReportingExporter, is_server: bool
    ) -> None:
        self._provider, self._exporter, self._is_server = provider, exporter, is_server
        self._tracer = provider.get_tracer("pagewire")

    def start(
        self, name: str, trace: str | None, state: str | None = None, *, ago_s: float = 0.0
    ) -> TracedSpan | None:
        """Begin a span. Returns None if its trace is not sampled.

        Args:
            name: of the span.
            trace: the parent's `traceparent`; with None or a malformed one, the span has no parent.
            state: the `tracestate` that came with it.
            ago_s: seconds since it began.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": trace or "", "tracestate": state or ""}
        context = TraceContextTextMapPropagator().extract(carrier, Context())
        kind = SpanKind.SERVER if self._is_server else SpanKind.INTERNAL
        start_ns = time.time_ns() - int(ago_s * 1e9)
        span: Any = self._tracer.start_span(name, context, kind, start_time=start_ns)
        return TracedSpan(self, span) if span.is_recording() else None

    def close(self) -> None:
        """Export what is left, as far as the collector takes it within `FLUSH_S`."""
        # The SDK's own limits of time do not hold while a request to the collector hangs.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        self._exporter.shutdown()


def start_span(tracing: Tracing | None, name: str, trace: str | None) -> TracedSpan | None:
    """Begin a span of a request that came with a `traceparent`. Returns None if it is not traced.

    Args:
        tracing: of this process; None if no endpoint is set.
        name: of the span.
        trace: the `traceparent`, if there was one.
    """
    if tracing is None or trace is None:
        return None
    return tracing.start(name, trace)


class _ReportingExporter:
    """Exports spans, and reports when that begins to fail and when it works again.

    The SDK's lines about each further failure are left out: there would be one a second.

    Args:
        exporter: of the SDK.
        endpoint: that it sends to, for the log.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter, self._endpoint = exporter, endpoint
        self._is_failing = self._is_closed = False
        self._sdk_logger = logging.getLogger(type(exporter).__module__)
        self._sdk_logger.addFilter(self._is_news)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans, or drop them after the end."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._is_closed:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._is_failing:
            logger.warning(
                "cannot export spans to %s; dropping them until it answers", self._endpoint
            )
        elif self._is_failing and not failed:
            logger.info("exporting spans again")
        self._is_failing = failed
        return result

    def shutdown(self) -> None:
        """End, whatever an export waits for between two tries. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._sdk_logger.removeFilter(self._is_news)
            self._exporter.shutdown()

    def _is_news(self, _record: logging.LogRecord) -> bool:
        return not self._is_failing


def open_tracing(
    endpoint: str | None, service: str, instance: str, *, is_server: bool = False
) -> Tracing | None:
    """Return a service's `Tracing`; None if no endpoint is set.

    Args:
        endpoint: base URL of an OTLP collector, as in OTEL_EXPORTER_OTLP_ENDPOINT.
        service: "router", "prefill" or "decode".
        instance: the service's id.
        is_server: see `Tracing`.

    Raises:
        ConfigError: the packages are missing.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ConfigError(
            "otlp_endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) is set, and OpenTelemetry's packages "
            f"are missing, the extra `otel`: {install_command('otel')}"
        ) from exc
    # OpenTelemetry logs warnings about headers that clients send.
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
    named = {"service.name": f"pagewire-{service}", "service.instance.id": instance}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    exporter = _ReportingExporter(
        OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S),
        endpoint,
    )
    processor = BatchSpanProcessor(
        cast("SpanExporter", exporter),  # the SDK is imported too late to inherit from it
        max_queue_size=MAX_QUEUED_SPANS,
        max_export_batch_size=512,
    )
    provider.add_span_processor(processor)
    return Tracing(provider, exporter, is_server)
