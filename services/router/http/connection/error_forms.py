"""Writes errors in the form of a route: Anthropic's to clients of its API, else OpenAI's."""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from pagewire.services.router.http.api.anthropic.error_objects import message_error
from pagewire.services.router.http.api.openai.formats import DONE, sse
from pagewire.services.router.http.api_errors import ApiError
from pagewire.services.router.http.connection.record import record_of

MESSAGES_PATH = "/v1/messages"
MODELS_PATH = "/v1/models"
VERSION_HEADER = b"anthropic-version"


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the HTTP response to a request."""
    request_id = record_of(scope).request_id
    if not is_anthropics(scope):
        return error.response(request_id)
    body = msgspec.json.encode(message_error(error, request_id))
    headers = {**error.headers, "request-id": request_id}
    return Response(body, error.status, headers=headers, media_type="application/json")


def end_with_error(error: ApiError, scope: Scope) -> bytes:
    """Return the events that end a stream in which something went wrong."""
    request_id = record_of(scope).request_id
    if is_anthropics(scope):
        return sse(message_error(error, request_id), "error")
    return sse(msgspec.Raw(error.body(request_id))) + DONE


def is_anthropics(scope: Scope) -> bool:
    """Whether a client uses Anthropic's API. Its header says so on paths that both APIs have."""
    path: str = scope["path"]
    if _is_at(path, MODELS_PATH):
        return any(name == VERSION_HEADER for name, _ in scope["headers"])
    return _is_at(path, MESSAGES_PATH)


def _is_at(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")
