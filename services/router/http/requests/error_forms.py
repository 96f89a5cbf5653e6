"""Errors in the form of a route: Anthropic's on the routes of its API, OpenAI's on all others."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from pagewire.services.router.http.answers.formats import DONE, error_event
from pagewire.services.router.http.errors import ApiError
from pagewire.services.router.http.messages.errors import message_error, message_error_event
from pagewire.services.router.http.requests.record import record_of

MESSAGES_PATH = "/v1/messages"


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the HTTP response to a request."""
    request_id = record_of(scope).request_id
    if not _is_anthropics(scope):
        return error.response(request_id)
    body, headers = message_error(error, request_id), {**error.headers, "request-id": request_id}
    return Response(body, error.status, headers=headers, media_type="application/json")


def end_with_error(error: ApiError, scope: Scope) -> bytes:
    """Return the events that end a stream in which something went wrong."""
    request_id = record_of(scope).request_id
    if _is_anthropics(scope):
        return message_error_event(error, request_id)
    return error_event(error.body(request_id)) + DONE


def _is_anthropics(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
