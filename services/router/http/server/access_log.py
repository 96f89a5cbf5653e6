"""Writes a log line at the end of each request, and puts its id into its response."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.services.router.dashboard.recent_requests import is_shown
from pagewire.services.router.http.connection.record import RECORD, RequestRecord
from pagewire.services.router.service import RouterService
from pagewire.shared.base.logs import current_request
from pagewire.shared.http.request_id import HEADER

logger = logging.getLogger(__name__)

QUIET_PATHS = frozenset({"/health", "/ready"})  # polled all the time


class AccessLog:
    """The outermost ASGI middleware: each response gets the request's id, each request a line."""

    def __init__(self, app: ASGIApp, service: RouterService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = scope[RECORD] = RequestRecord(scope)
        current_request.set(record.request_id)  # each request has its own task
        field = (HEADER, record.request_id.encode("ascii"))

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], field]}
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except asyncio.CancelledError:
            record.outcome = "cut"
            raise
        except Exception as exc:  # a bug: uvicorn logs its traceback
            record.fail(exc, "failed")
            raise
        finally:
            self._report(record)
            del scope[RECORD]  # which has the scope: a cycle would be garbage

    def _report(self, record: RequestRecord) -> None:
        """Count the request for its key, show it to operators, and write its line."""
        record.end_span()
        is_quiet = record.scope["path"] in QUIET_PATHS
        if record.key is not None and not is_quiet:
            self._count(record.key, record)
        level = logging.WARNING if record.final_outcome == "failed" else logging.INFO
        if level == logging.INFO and is_quiet:
            level = logging.DEBUG
        is_kept = is_shown(record.scope["method"], record.scope["path"], record.status)
        if not (is_kept or logger.isEnabledFor(level)):
            return
        fields = record.fields()
        if is_kept:
            timings = None if record.answers is None else record.answers.timings
            self._service.recent.note(record.request_id, fields, timings, time.time())
        logger.log(level, "request", extra={"fields": fields})

    def _count(self, key: str, record: RequestRecord) -> None:
        meter = self._service.key_meter
        meter.count_request(key, record.final_outcome)
        if record.answers is not None:
            usage = record.answers.usage
            tokens = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            meter.count_tokens(key, *tokens)
