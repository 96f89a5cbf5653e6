"""Checks the API keys of requests before their bodies are read."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from pagewire.services.router.http.api_errors import InvalidKeyError
from pagewire.services.router.http.connection.record import record_of
from pagewire.services.router.http.openapi.pages import DOCS_PATHS
from pagewire.services.router.http.server.error_answer import error_answer
from pagewire.services.router.service import RouterService

# Gateways and orchestrators have no key; the page asks for one to show the OpenAPI document.
OPEN_PATHS = frozenset({"/health", "/ready", *DOCS_PATHS})

_BEARER = b"bearer "


class KeyCheck:
    """ASGI middleware: answers 401 if a key is needed and the request has no valid one."""

    def __init__(self, app: ASGIApp, service: RouterService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI has it."""
        keys = self._service.api_keys
        if keys is None or scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = record_of(scope)
        sent = sent_keys(scope["headers"])
        record.key = next((name for key in sent if (name := keys.name_of(key))), None)
        if record.key is None and scope["path"] not in OPEN_PATHS:
            refusal = InvalidKeyError(was_sent=bool(sent))
            return await error_answer(self._service, refusal, scope)(scope, receive, send)
        await self._app(scope, receive, send)


def sent_keys(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the keys that a request has: its bearer token, then its `x-api-key`.

    If a header field is repeated, the first one counts.
    """
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        fields.setdefault(name, value)
    authorization = fields.get(b"authorization", b"")
    keys = [fields.get(b"x-api-key", b"")]
    if authorization[: len(_BEARER)].lower() == _BEARER:
        keys.insert(0, authorization[len(_BEARER) :])
    return [key for sent_key in keys if (key := sent_key.strip())]
