"""Types and parsers for the lines of OpenAI's batch files: requests in, answers out."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from pagewire.shared.base.errors import UNDECODABLE, PagewireError

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
)
MAX_CUSTOM_ID_CHARS = 512
MAX_LINE_BYTES = 256 << 20
ID_PREFIX = "batch_req_"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BatchLineError(PagewireError):
    """A line of a batch file is wrong; the message does not have the line's number."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of the input file: a request and the id that its answer gets.

    Attributes:
        url: one of `URLS`.
        body: a JSON object.
    """

    custom_id: str
    url: str
    body: bytes


class BatchAnswer(msgspec.Struct, frozen=True):
    """The endpoint's HTTP response, with any status."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchFailure(msgspec.Struct, frozen=True):
    """The reason why there is no response."""

    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True):
    """A line of the output file: a request's answer, or why there is none."""

    id: str
    custom_id: str
    response: BatchAnswer | None = None
    error: BatchFailure | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the request got an answer with an HTTP status of success."""
        return self.response is not None and 200 <= self.response.status_code < 300


class _InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: Any = None


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield each line with its line end, which the last line may lack.

    Raises:
        BatchLineError: a line has more than `MAX_LINE_BYTES`.
    """
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise BatchLineError(f"the line has more than {MAX_LINE_BYTES >> 20} MiB")
        yield line


def parse_request(line: bytes) -> BatchRequest | None:
    """Parse a line of the input; return None if it is blank.

    Raises:
        BatchLineError: the line is not a request that a batch can have.
    """
    line = line.removeprefix(_BYTE_ORDER_MARK).strip()
    if not line:
        return None
    try:
        request = msgspec.json.decode(line, type=_InputLine)
    except UNDECODABLE as exc:
        raise BatchLineError(f"{exc}; a line has custom_id, method, url and body") from exc
    if not 0 < len(request.custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise BatchLineError(f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters")
    if request.method != "POST":
        raise BatchLineError(f"method must be POST, not {request.method[:20]!r}")
    if request.url not in URLS:
        raise BatchLineError(f"url must be one of {', '.join(URLS)}, not {request.url[:100]!r}")
    body = bytes(request.body)
    try:
        stream = msgspec.json.decode(body, type=_Body).stream
    except UNDECODABLE as exc:
        raise BatchLineError(f"body: {exc}") from exc
    if stream not in (None, False):
        raise BatchLineError("body.stream must be false or absent: a batch has whole answers")
    return BatchRequest(request.custom_id, request.url, body)


def parse_output(line: bytes) -> OutputLine:
    """Parse a line of the output.

    Raises:
        BatchLineError: the line has another form.
    """
    try:
        return msgspec.json.decode(line, type=OutputLine)
    except UNDECODABLE as exc:
        raise BatchLineError(f"this is not a line of a batch's output: {exc}") from exc


def answered(request: BatchRequest, status: int, request_id: str, body: bytes) -> OutputLine:
    """Return the output line of a response; only white space of its body may change.

    Args:
        request: the request that was answered.
        status: status of the HTTP response.
        request_id: request id from its headers; may be empty.
        body: body of the response.
    """
    try:
        msgspec.json.decode(body)
        compact = msgspec.json.format(body, indent=-1)
    except UNDECODABLE as exc:
        return failed(
            request, "invalid_answer", f"HTTP {status} with a body that is not JSON: {exc}"
        )
    return OutputLine(
        _new_id(), request.custom_id, BatchAnswer(status, request_id, msgspec.Raw(compact))
    )


def failed(request: BatchRequest, code: str, message: str) -> OutputLine:
    """Return the output line of a request that has no response."""
    return OutputLine(_new_id(), request.custom_id, error=BatchFailure(code, message))


def _new_id() -> str:
    return f"{ID_PREFIX}{secrets.token_hex(12)}"
