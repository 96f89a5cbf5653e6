"""Writes errors as the object that Anthropic's API answers with."""

from __future__ import annotations

from typing import Final

from pagewire.services.router.http.api.anthropic import objects
from pagewire.services.router.http.api_errors import SERVER_ERROR, ApiError

# Anthropic's name of the error by which clients learn that they must send whole conversations.
THREAD_UNSUPPORTED: Final = "thread_unsupported_request"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def message_error(error: ApiError, request_id: str) -> objects.MessageError:
    """Return the error object of a request."""
    otherwise = "api_error" if error.status >= SERVER_ERROR else "invalid_request_error"
    problem = objects.MessageProblem(_KINDS.get(error.status, otherwise), error.message)
    if error.code == THREAD_UNSUPPORTED:
        problem.details = objects.ThreadProblem(THREAD_UNSUPPORTED, ["thread"])
    return objects.MessageError(problem, request_id)
