"""Ends requests that outlast the drain time, with an error for their clients."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.services.router.http.api_errors import ShutDownError, describe
from pagewire.services.router.http.connection.error_forms import end_with_error, error_response
from pagewire.services.router.http.connection.record import record_of
from pagewire.services.router.service import RouterService

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 2.0  # for a client to take the error


class CutRequests:
    """ASGI middleware: a request that is cancelled while the router drains ends with an error.

    A stream ends with an event of it; a request that was not answered yet gets status 503.
    """

    def __init__(self, app: ASGIApp, service: RouterService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI has it."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http" or not self._service.is_draining:
                raise
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._end(scope, receive, send)
            except TimeoutError:  # without the end of the body: the server closes the connection
                logger.info(
                    "closing a connection: its client did not read for %g s at the response's end",
                    SEND_TIMEOUT_S,
                )

    async def _end(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, record = describe(ShutDownError("cut, the drain time is over")), record_of(scope)
        record.outcome = "cut"
        self._service.metrics.request_errors.labels(error.status).inc()
        if not record.status:
            await error_response(error, scope)(scope, receive, send)
        elif record.has_events:
            last = end_with_error(error, scope)
            await send({"type": "http.response.body", "body": last, "more_body": False})
