"""Serves the OpenAPI document at `/openapi.json`, and Swagger UI's page at `/docs`.

The page's files are in `docs/`, and Swagger UI's in the package `fastapi_offline`, so that nothing
is loaded from elsewhere. Where requests need an API key, so does the document. The page, which says
nothing of the server, asks for the key and sends it with what a reader tries out.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.services.router.dashboard.pages import HEADERS, file_route
from pagewire.services.router.http.openapi.document import openapi_document
from pagewire.services.router.http.routes.generation import service_of

PAGE = "/docs"
_OWN = resources.files(__package__).joinpath("docs")
_SWAGGER_UI = resources.files("fastapi_offline").joinpath("static")
FILES = {
    PAGE: (_OWN.joinpath("page.html"), "text/html; charset=utf-8"),
    f"{PAGE}/style.css": (_OWN.joinpath("style.css"), "text/css; charset=utf-8"),
    f"{PAGE}/page.js": (_OWN.joinpath("page.js"), "text/javascript; charset=utf-8"),
    **{
        f"{PAGE}/{name}": (_SWAGGER_UI.joinpath(name), f"text/{kind}; charset=utf-8")
        for name, kind in (("swagger-ui.css", "css"), ("swagger-ui-bundle.js", "javascript"))
    },
}
# Swagger UI writes styles into the page, and has icons as data.
_HEADERS = {
    **HEADERS,
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'"
    ),
}
DOCS_PATHS = frozenset(FILES)

docs_router = APIRouter(redirect_slashes=False, include_in_schema=False)
docs_router.routes.extend(
    file_route(path, file.read_bytes(), kind, _HEADERS) for path, (file, kind) in FILES.items()
)


@docs_router.get("/openapi.json")
async def show_document(request: Request) -> Response:
    """Return the OpenAPI document that describes the routes of this router."""
    service = service_of(request)
    body = openapi_document(service.api_keys is not None, service.model.name)
    return Response(body, media_type="application/json")
