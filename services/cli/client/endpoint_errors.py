"""Errors between a command and an endpoint, with messages for users."""

from __future__ import annotations

import httpx
import msgspec

from pagewire.services.cli.client.openai_messages import ErrorBody
from pagewire.services.cli.program import own_command
from pagewire.shared.base.errors import UNDECODABLE, PagewireError

MAX_ERROR_CHARS = 500
MAX_FOREIGN_CHARS = 100  # of a response that is not OpenAI's, such as a proxy's page


class EndpointError(PagewireError):
    """The endpoint cannot be reached, refuses a request, or breaks off an answer.

    Attributes:
        kind: kind of error, for counting, for example "connect", "timeout", "http 429", "stream".
        status: status of the HTTP response; None if there was no error response.
    """

    def __init__(self, message: str, kind: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.status = kind, status


def unreachable(url: str, exc: httpx.HTTPError) -> EndpointError:
    """Return the error for a connection that cannot be made.

    Its kind is "certificate", "timeout" or "connect".
    """
    if "CERTIFICATE_VERIFY_FAILED" in str(exc):
        text = str(exc).partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return EndpointError(
            f"the certificate of {url} is not trusted: {text or exc}; name the file of "
            "the authority that signed it in SSL_CERT_FILE",
            "certificate",
        )
    kind = "timeout" if isinstance(exc, httpx.TimeoutException) else "connect"
    return EndpointError(
        f"nothing answers at {url}: {reason(exc)}; start a cluster with "
        f"`{own_command()} up`, or name another endpoint with --url",
        kind,
    )


def reason(exc: BaseException) -> str:
    """Return an error's message, or its name if it has none: a reset connection has none."""
    return str(exc) or type(exc).__name__


def refusal(status: int, body: bytes) -> EndpointError:
    """Return the error for a request that the endpoint refused."""
    try:
        error = msgspec.json.decode(body, type=ErrorBody).error
        reason = clipped(error if isinstance(error, str) else error.message) or "no reason given"
    except UNDECODABLE:
        text = clipped(body.decode(errors="replace"), MAX_FOREIGN_CHARS)
        reason = f"not an OpenAI error, is the URL right? {text}" if text else "no reason given"
    return EndpointError(f"HTTP {status}: {reason}", f"http {status}", status)


def clipped(text: str, max_chars: int = MAX_ERROR_CHARS) -> str:
    """Return a text on one line, cut after `max_chars`."""
    text = " ".join(text.split())
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."
