"""Anthropic's error object."""

from __future__ import annotations

from typing import Any

import msgspec

from pagewire.services.router.http.errors import SERVER_ERROR, ApiError

# Anthropic's name of the error by which clients learn that they must send whole conversations.
THREAD_UNSUPPORTED = "thread_unsupported_request"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def message_error(error: ApiError, request_id: str) -> bytes:
    """Return the JSON error object of a request."""
    otherwise = "api_error" if error.status >= SERVER_ERROR else "invalid_request_error"
    said: dict[str, Any] = {
        "type": _KINDS.get(error.status, otherwise),
        "message": error.message,
    }
    if error.code == THREAD_UNSUPPORTED:
        said["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return msgspec.json.encode({"type": "error", "error": said, "request_id": request_id})


def message_error_event(error: ApiError, request_id: str) -> bytes:
    """Return the event of an error in the middle of a stream, which ends it."""
    return b"event: error\ndata: " + message_error(error, request_id) + b"\n\n"
