"""Writes parts of a response directly to the transport, in the callback in which tokens arrive.

ASGI's `send` is a coroutine: each part would cost a task's wake-up. Only the head and the end of a
response go through `send`, so that uvicorn handles them as with any response.
"""

from __future__ import annotations

import asyncio

from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pagewire.services.router.http.api.openai.formats import Format
from pagewire.shared.http.bounded_protocol import BoundedHttpProtocol
from pagewire.shared.text.answer_text import TextDelta

_EXTENSION = "pagewire.direct_writer"


class DirectWriter:
    """Writes events to the body of one response, between two calls of its `send`."""

    __slots__ = ("_flow", "_form", "_has_begun", "_is_ready", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow
        self._form: Format
        self._has_begun = self._is_ready = False

    def begin(self, form: Format) -> None:
        """Write events of a form from here on. The head has been sent, for a body in chunks."""
        self._form, self._has_begun = form, True
        self.update()

    def update(self) -> None:
        """Handle that the client has begun or stopped reading."""
        self._is_ready = self._has_begun and not self._flow.write_paused

    def end(self) -> None:
        """Write nothing from here on: the client has left."""
        self._has_begun = self._is_ready = False

    def push(self, index: int, delta: TextDelta) -> bool:
        """Write the event of a delta, unless the client has not read earlier events yet.

        Returns:
            Whether it is written.
        """
        if not self._is_ready:
            return False
        if event := self._form.stream_chunk(index, delta):
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        return True


class DirectWritesProtocol(BoundedHttpProtocol):
    """Gives each request's scope a `DirectWriter`."""

    _writer: DirectWriter | None = None  # writer of the request that is served, or was served last

    def pause_writing(self) -> None:
        """Stop direct writes: the client does not read what was sent."""
        super().pause_writing()
        if self._writer is not None:
            self._writer.update()

    def resume_writing(self) -> None:
        """Resume direct writes: the client has read most of it."""
        super().resume_writing()
        if self._writer is not None:
            self._writer.update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; its requests learn of it."""
        if self._writer is not None:
            self._writer.end()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._writer = DirectWriter(self.transport, self.flow)
        cycle.scope["extensions"] = {_EXTENSION: {"writer": self._writer}}
        super()._start_asgi_task(cycle, app)


def direct_writer(scope: Scope) -> DirectWriter | None:
    """Return the writer of a request's response; None under another server."""
    writer: DirectWriter | None = scope.get("extensions", {}).get(_EXTENSION, {}).get("writer")
    return writer
