"""Writing parts of a response straight to the transport, from where the data arrive.

ASGI's `send` is a coroutine: each part costs a task's wake-up. Head and end of a response go
through it all the same, so that uvicorn does what it does with any response.
"""

from __future__ import annotations

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pagewire.shared.http.protocol import BoundedHttpProtocol

_EXTENSION = "pagewire.direct_writer"


class DirectWriter:
    """Writes to the body of one response between two calls of its `send`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether the body has begun, in chunks, and the client takes what is written."""
        cycle = self._cycle
        return cycle.chunked_encoding is True and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, part: bytes) -> None:
        """Write a part of the body, not empty; only if `is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class DirectWritesProtocol(BoundedHttpProtocol):
    """Gives each request's scope a `DirectWriter`."""

    def on_headers_complete(self) -> None:
        """Start the request."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {_EXTENSION: {"writer": DirectWriter(self.cycle)}}


def direct_writer(scope: Scope) -> DirectWriter | None:
    """Return the writer of a request's response; None under another server."""
    writer: DirectWriter | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("writer")
    return writer
