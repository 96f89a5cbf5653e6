"""OpenAI's error object for everything that goes wrong, and its HTTP status.

What happened inside goes to the log; a client reads no path, address or traceback.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagewire.shared.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
    PagewireError,
)
from pagewire.shared.http.refusals import error_object

NO_WORKER_RETRY_S = 2.0
SERVER_ERROR = 500
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; so nginx names it in access logs

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_INTERNAL_MESSAGE = "The server failed to answer this request. It was logged; try again."
_HTTP_MESSAGES = {
    404: "There is no such path. Try /v1/models, /v1/completions or /v1/chat/completions.",
    405: "This path does not take that HTTP method.",
}


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together do not fit into the model's context."""


class BodyTooLargeError(InvalidRequestError):
    """The request's body has more bytes than the router reads."""


class BodyTimeoutError(InvalidRequestError):
    """The request's body did not arrive in time."""


class ClientGoneError(PagewireError):
    """The client closed its connection before it was answered."""


class ShutDownError(PagewireError):
    """The router ends before the request has its answer."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """What a client gets.

    Attributes:
        kind: OpenAI's `type`.
        param: the field at fault, e.g. `messages[0].content`.
        code: for programs to read.
    """

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the JSON error object."""
        return error_object(self.message, self.kind, self.param, self.code)

    def response(self) -> Response:
        """Return the HTTP response."""
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def describe(exc: Exception) -> ApiError:
    """Map an exception to what a client gets."""
    match exc:
        case ModelNotFoundError():
            return ApiError(404, exc.message, _INVALID, exc.param, "model_not_found")
        case ContextLengthError():
            return ApiError(400, exc.message, _INVALID, exc.param, "context_length_exceeded")
        case BodyTooLargeError():
            return ApiError(413, exc.message, _INVALID, exc.param, "request_too_large")
        case BodyTimeoutError():
            return ApiError(408, exc.message, _INVALID, exc.param, "request_timeout")
        case InvalidRequestError():
            return ApiError(400, exc.message, _INVALID, exc.param)
        case OverloadedError():
            headers = _retry_after(exc.retry_after_s)
            message = "The server is overloaded: it holds all the requests it can. Try again later."
            return ApiError(429, message, "rate_limit_error", None, "rate_limit_exceeded", headers)
        case NoWorkerError():
            headers = _retry_after(NO_WORKER_RETRY_S)
            problem = f"came back within {exc.waited_s:g} s" if exc.waited_s else "can answer now"
            message = f"No worker {problem}. Try again in a moment."
            return ApiError(503, message, _SERVER, None, "no_worker_available", headers)
        case ShutDownError():
            headers = _retry_after(NO_WORKER_RETRY_S)
            message = "The server shuts down. Send the request again in a moment."
            return ApiError(503, message, _SERVER, None, "shutting_down", headers)
        case ClientGoneError():
            return ApiError(CLIENT_CLOSED_REQUEST, "The client closed the connection.", _INVALID)
        case HTTPException():
            return _describe_http(exc)
        case _:
            return ApiError(SERVER_ERROR, _INTERNAL_MESSAGE, _SERVER, None, "internal_error")


def _describe_http(exc: HTTPException) -> ApiError:
    message = _HTTP_MESSAGES.get(exc.status_code, "The request cannot be handled.")
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code)
    return ApiError(exc.status_code, message, _INVALID, None, code, dict(exc.headers or {}))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds)))}
