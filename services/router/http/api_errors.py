"""Maps every exception to OpenAI's error object and its HTTP status.

Details go to the log; clients get no paths, addresses or tracebacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagewire.services.router.metrics.requests import Outcome
from pagewire.shared.base.errors import (
    BusyError,
    ForeignPageError,
    HarmfulRequestError,
    InvalidRequestError,
    KeyLimitError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
    PagewireError,
)
from pagewire.shared.http.refusals import error_object

NO_WORKER_RETRY_S = 2.0
BUSY_RETRY_S = 5.0
SERVER_ERROR = 500
REFUSALS = (429, 503)  # no room, no worker, no time
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; so nginx names it in access logs

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_INTERNAL_MESSAGE = "The server failed to answer this request. It was logged; try again."
_HTTP_MESSAGES = {
    404: "There is no such path. Try /v1/models or /v1/chat/completions; /docs lists all.",
    405: "This path does not take that HTTP method.",
}


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together do not fit into the model's context."""


class BodyTooLargeError(InvalidRequestError):
    """The request's body has more bytes than the router reads."""


class BodyEncodingError(InvalidRequestError):
    """The request's body is compressed, which this server does not support."""


class BodyTimeoutError(InvalidRequestError):
    """The request's body did not arrive in time."""


class ClientGoneError(PagewireError):
    """The client closed its connection before it was answered."""


class InvalidKeyError(PagewireError):
    """The request has no valid API key.

    Attributes:
        was_sent: it has one that is not valid.
    """

    def __init__(self, was_sent: bool) -> None:
        super().__init__("a wrong API key" if was_sent else "no API key")
        self.was_sent = was_sent


class ResponseNotFoundError(PagewireError):
    """No response that the client may read has this id.

    Attributes:
        param: the field that names it; None: the path does.
    """

    def __init__(self, response_id: str, param: str | None) -> None:
        super().__init__(f"no response {response_id[:100]!r}")
        self.response_id, self.param = response_id[:100], param


class StoreUnavailableError(PagewireError):
    """Stored responses cannot be read or removed now."""


class ShutDownError(PagewireError):
    """The router ends before the request has its answer."""


# Status and code of the client's errors; the code of any other is its own.
_OF_CLIENT: dict[type[InvalidRequestError], tuple[int, str | None]] = {
    ForeignPageError: (403, None),
    ModelNotFoundError: (404, "model_not_found"),
    ContextLengthError: (400, "context_length_exceeded"),
    BodyTooLargeError: (413, "request_too_large"),
    BodyEncodingError: (415, "unsupported_content_encoding"),
    BodyTimeoutError: (408, "request_timeout"),
}


@dataclass(frozen=True, slots=True)
class ApiError:
    """The HTTP status, text and headers of the error that a client gets.

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

    def body(self, request_id: str) -> bytes:
        """Return the JSON error object of a request."""
        return error_object(self.message, self.kind, self.param, self.code, request_id)

    def response(self, request_id: str) -> Response:
        """Return the HTTP response to a request."""
        body = self.body(request_id)
        return Response(body, self.status, headers=self.headers, media_type="application/json")


def describe(exc: Exception) -> ApiError:
    """Map an exception to what a client gets."""
    match exc:
        case InvalidRequestError():
            status, code = _OF_CLIENT.get(type(exc), (400, None))
            code = code or exc.code or ("invalid_value" if exc.param else None)
            return ApiError(status, exc.message, _INVALID, exc.param, code)
        case InvalidKeyError():
            problem = "The API key is not valid" if exc.was_sent else "This server needs an API key"
            message = f"{problem}: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            headers = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, _INVALID, None, "invalid_api_key", headers)
        case OverloadedError():
            headers = _retry_after(exc.retry_after_s)
            message = "The server is overloaded: it holds all the requests it can. Try again later."
            if isinstance(exc, KeyLimitError):
                message = f"Too many at once: {exc}. Try again when some have ended."
            return ApiError(429, message, "rate_limit_error", None, "rate_limit_exceeded", headers)
        case BusyError():
            message = f"The server is busy: {exc}. Send the request again in a moment."
            return _unavailable("server_busy", message, BUSY_RETRY_S)
        case NoWorkerError():
            problem = f"came back within {exc.waited_s:g} s" if exc.waited_s else "can answer now"
            message = f"No worker {problem}. Try again in a moment."
            return _unavailable("no_worker_available", message)
        case HarmfulRequestError():
            message = (
                f"This request made a worker fail: {exc}. Do not send it again. Who runs this "
                "server finds the cause by the request's id in the worker's log."
            )
            headers = {"x-should-retry": "false"}  # OpenAI's and Anthropic's clients obey it
            return ApiError(SERVER_ERROR, message, _SERVER, None, "request_harms_workers", headers)
        case ResponseNotFoundError():
            return _describe_missing(exc)
        case StoreUnavailableError():
            message = "Stored responses cannot be read now. Try again in a moment."
            return _unavailable("store_unavailable", message)
        case ShutDownError():
            message = "The server shuts down. Send the request again in a moment."
            return _unavailable("shutting_down", message)
        case ClientGoneError():
            return ApiError(CLIENT_CLOSED_REQUEST, "The client closed the connection.", _INVALID)
        case HTTPException():
            return _describe_http(exc)
        case _:
            return ApiError(SERVER_ERROR, _INTERNAL_MESSAGE, _SERVER, None, "internal_error")


def _unavailable(code: str, message: str, retry_s: float = NO_WORKER_RETRY_S) -> ApiError:
    return ApiError(503, message, _SERVER, None, code, _retry_after(retry_s))


def _describe_missing(exc: ResponseNotFoundError) -> ApiError:
    if exc.param is None:
        message = f"Response with id '{exc.response_id}' not found."
        return ApiError(404, message, _INVALID, None, "response_not_found")
    message = f"Previous response with id '{exc.response_id}' not found."
    return ApiError(404, message, _INVALID, exc.param, "previous_response_not_found")


def outcome_of(status: int) -> Outcome:
    """Return what became of a request that was answered with an error status."""
    if status in REFUSALS:
        return "refused"
    if status == CLIENT_CLOSED_REQUEST:
        return "gone"
    return "failed" if status >= SERVER_ERROR else "invalid"


def _describe_http(exc: HTTPException) -> ApiError:
    message = _HTTP_MESSAGES.get(exc.status_code, "The request cannot be handled.")
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code)
    return ApiError(exc.status_code, message, _INVALID, None, code, dict(exc.headers or {}))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds)))}
