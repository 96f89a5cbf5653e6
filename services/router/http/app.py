"""The router as an ASGI application."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagewire.services.router.http.api import router
from pagewire.services.router.http.cut import CutRequests
from pagewire.services.router.http.errors import SERVER_ERROR, describe
from pagewire.services.router.service import RouterService
from pagewire.shared.errors import PagewireError

logger = logging.getLogger(__name__)


def create_app(service: RouterService) -> FastAPI:
    """Return the application; its lifespan opens and closes the service.

    Args:
        service: connected, and not used before.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    # Bodies are checked by our own models; the pages of documentation would load scripts from
    # elsewhere.
    app = FastAPI(title="Pagewire", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    app.include_router(router)
    app.add_middleware(CutRequests, service=service)
    for kind in (PagewireError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    return app


async def _on_error(request: Request, exc: Exception) -> Response:
    """Answer with OpenAI's error object; the log has the rest."""
    error = describe(exc)
    level = logging.WARNING if error.status == SERVER_ERROR else logging.INFO
    client = request.client.host if request.client else "-"
    logger.log(
        level, "%s %s %r: %d: %r", client, request.method, request.url.path, error.status, exc
    )
    service: RouterService = request.app.state.service
    service.metrics.request_errors.labels(error.status).inc()
    return error.response()
