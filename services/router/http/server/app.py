"""Composes the router's ASGI application: routes, key check, log lines, errors.

AccessLog > BrowserCheck > CORSMiddleware > KeyCheck > CutRequests > UnreadResponses > routes
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from pagewire.services.router.http.openapi.document import ROUTERS as PUBLIC_ROUTERS
from pagewire.services.router.http.openapi.pages import docs_router
from pagewire.services.router.http.server.access_log import AccessLog
from pagewire.services.router.http.server.drain_cutoff import CutRequests
from pagewire.services.router.http.server.error_answer import error_answer
from pagewire.services.router.http.server.key_check import KeyCheck
from pagewire.services.router.http.server.unread_responses import UnreadResponses
from pagewire.services.router.service import RouterService
from pagewire.shared.base.errors import PagewireError
from pagewire.shared.http.browser_check import BrowserCheck, BrowserRules

ROUTERS = (*PUBLIC_ROUTERS, docs_router)
METHOD_NOT_ALLOWED = 405
CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
# Response headers that a web page may read; `request-id` is a name of Anthropic's API.
CORS_EXPOSED = ("x-request-id", "request-id", "retry-after")
CORS_MAX_AGE_S = 600


def create_app(service: RouterService, listener: socket.socket) -> ASGIApp:
    """Return the application; its lifespan opens and closes the service.

    Args:
        service: connected, and not used before.
        listener: the bound socket that connections come from.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    # Bodies are checked by our own types, which FastAPI's document would not have.
    routes = FastAPI(title="Pagewire", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    routes.state.service = service
    for router in ROUTERS:
        _answer_head(router)
        routes.include_router(router)
    for kind in (PagewireError, HTTPException):
        routes.add_exception_handler(kind, _on_error)
    routes.add_exception_handler(Exception, _on_bug)
    # Outside of the routes' own middleware, which answers errors that nobody expects.
    app: ASGIApp = UnreadResponses(routes, service)
    app = KeyCheck(CutRequests(app, service), service)
    origins = service.settings.cors_origins or ()
    if origins:
        app = CORSMiddleware(  # a browser asks first without a key
            app,
            allow_origins=origins,
            allow_methods=CORS_METHODS,
            allow_headers=["*"],
            expose_headers=CORS_EXPOSED,
            max_age=CORS_MAX_AGE_S,
        )
    rules = BrowserRules(listener, service.settings.own_names, origins)
    app = BrowserCheck(app, rules, partial(error_answer, service))
    return AccessLog(app, service)


def _answer_head(router: APIRouter) -> None:
    """Let each route that takes GET take HEAD as well; uvicorn leaves the response's body out."""
    for route in router.routes:
        if isinstance(route, Route) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


async def _on_error(request: Request, exc: Exception) -> Response:
    """Answer with the route's error object; the request's log line has the rest."""
    if isinstance(exc, HTTPException) and exc.status_code == METHOD_NOT_ALLOWED:
        exc.headers = {"Allow": ", ".join(sorted(_methods_of_path(request)))}
    return error_answer(request.app.state.service, exc, request.scope)


async def _on_bug(request: Request, exc: Exception) -> Response:
    """Answer an error that nobody expects; uvicorn logs its traceback and closes the connection."""
    response = await _on_error(request, exc)
    response.headers["Connection"] = "close"
    return response


def _methods_of_path(request: Request) -> set[str]:
    """Return the methods of all routes that a path has; FastAPI names those of one.

    A route of just this path counts before those with a field in its place.
    """
    methods = [
        route
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    exact = [route for route in methods if route.path == request.scope["path"]]
    return {method for route in exact or methods for method in route.methods or ()}
