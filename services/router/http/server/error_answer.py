"""Answers a request with an error, and notes it in the request's log line and in the metrics."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from pagewire.services.router.http.api_errors import describe
from pagewire.services.router.http.connection.error_forms import error_response
from pagewire.services.router.http.connection.record import record_of
from pagewire.services.router.service import RouterService
from pagewire.shared.base.errors import OverloadedError


def error_answer(service: RouterService, exc: Exception, scope: Scope) -> Response:
    """Return the response; its error object has the form of the route."""
    error, record = describe(exc), record_of(scope)
    record.fail(exc)
    service.metrics.request_errors.labels(error.status).inc()
    if isinstance(exc, OverloadedError):
        service.key_meter.count_refusal(record.key, exc)
    return error_response(error, scope)
