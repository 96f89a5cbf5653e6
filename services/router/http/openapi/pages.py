"""The OpenAPI document at `/openapi.json`, and the page that shows it at `/docs`.

The page's files are in `docs/`. It loads nothing from elsewhere. Where requests need an API key, so
does the document; the page, which says nothing of the server, asks for the key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.services.router.dashboard.pages import HEADERS
from pagewire.services.router.http.openapi.document import openapi_document
from pagewire.services.router.http.routes.generation import service_of

PAGE = "/docs"
FILES = {
    PAGE: ("page.html", "text/html; charset=utf-8"),
    f"{PAGE}/style.css": ("style.css", "text/css; charset=utf-8"),
    f"{PAGE}/page.js": ("page.js", "text/javascript; charset=utf-8"),
    f"{PAGE}/schema.js": ("schema.js", "text/javascript; charset=utf-8"),
}
DOCS_PATHS = frozenset(FILES)

docs_router = APIRouter(redirect_slashes=False, include_in_schema=False)


@docs_router.get("/openapi.json")
async def show_document(request: Request) -> Response:
    """Return the OpenAPI document."""
    body = openapi_document(service_of(request).api_keys is not None)
    return Response(body, media_type="application/json")


def _shows(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = resources.files(__package__).joinpath("docs", name).read_bytes()

    async def show() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return show


for _path, (_name, _kind) in FILES.items():
    docs_router.get(_path)(_shows(_name, _kind))
