"""Responses to connections that are ended before their request reaches a route."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from pagewire.shared.http.request_id import HEADER, new_request_id

MAX_HEADER_BYTES = 64 << 10
MAX_HEADER_FIELDS = 100


def error_object(
    message: str, kind: str, param: str | None, code: str | None, request_id: str
) -> bytes:
    """Return OpenAI's JSON error object, with the id that the request has in logs."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": {**error, "request_id": request_id}})


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP error after which the connection is closed.

    Attributes:
        kind: OpenAI's `type`.
        reason: its name in the metrics.
    """

    status: HTTPStatus
    message: str
    code: str
    kind: str = "invalid_request_error"
    reason: str = "invalid"

    def response(self) -> bytes:
        """Return the bytes of an HTTP response with this refusal."""
        request_id = new_request_id()
        body = error_object(self.message, self.kind, None, self.code, request_id)
        retry = "Retry-After: 1\r\n" if self.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            f"{HEADER.decode()}: {request_id}\r\n"
            f"{retry}Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + body


NO_ROOM = Refusal(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "All connections that this server can hold are in use. Try again in a moment.",
    "too_many_connections",
    "server_error",
    "refused",
)
SLOW_HEADER = Refusal(
    HTTPStatus.REQUEST_TIMEOUT,
    "The request's header did not arrive in time.",
    "request_timeout",
    reason="slow",
)
LARGE_HEADER = Refusal(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"The request's header is too large: at most {MAX_HEADER_BYTES} bytes and "
    f"{MAX_HEADER_FIELDS} fields.",
    "header_too_large",
)
MALFORMED = Refusal(
    HTTPStatus.BAD_REQUEST,
    "This is not a valid HTTP/1.1 request.",
    "malformed_request",
)
UNKNOWN_CODING = Refusal(
    HTTPStatus.NOT_IMPLEMENTED,
    "The only Transfer-Encoding that this server knows is chunked. Send the body as it is.",
    "transfer_encoding_unknown",
)
CODED_BEFORE_1_1 = Refusal(
    HTTPStatus.BAD_REQUEST,
    "Transfer-Encoding needs HTTP/1.1: send that version, or a Content-Length.",
    "malformed_request",
)
