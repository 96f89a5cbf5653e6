"""Serves the dashboard's files and data, below `/dashboard` on the operator port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

PAGE = "/dashboard"
FILES = {
    "page.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "numbers.js": "text/javascript; charset=utf-8",
}
# The page loads nothing from elsewhere and runs nothing inline, so that a name that looks like HTML
# can do nothing even if it became HTML. No other page may frame it.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def dashboard_routes(document: Callable[[], Awaitable[bytes]]) -> list[BaseRoute]:
    """Return the page, its files and its document.

    Args:
        document: makes the document.
    """

    async def show_data(_request: Request) -> Response:
        return Response(await document(), media_type="application/json", headers=HEADERS)

    routes: list[BaseRoute] = [Route(f"{PAGE}/data", show_data)]
    folder = resources.files(__package__)
    for name, kind in FILES.items():
        path = PAGE if name == "page.html" else f"{PAGE}/{name}"
        routes.append(file_route(path, folder.joinpath(name).read_bytes(), kind, HEADERS))
    return routes


def file_route(path: str, content: bytes, kind: str, headers: Mapping[str, str]) -> Route:
    """Return a route that serves a file's content.

    Args:
        path: where it is.
        content: the file's.
        kind: its media type.
        headers: of the response.
    """

    async def show(_request: Request) -> Response:
        return Response(content, media_type=kind, headers=headers)

    return Route(path, show)
