"""Counts what requests hold until their clients have the responses: connections, unread bytes."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.services.router.http.connection.http_io import UNCOUNTED_BYTES
from pagewire.services.router.http.connection.record import record_of
from pagewire.services.router.http.server.error_answer import error_answer
from pagewire.services.router.service import RouterService
from pagewire.shared.base.errors import OverloadedError

PART_BYTES = UNCOUNTED_BYTES


class UnreadResponses:
    """ASGI middleware: what a request holds is its owner's until its client has the response.

    That is a connection, and the bytes of a large response, which count like bodies of requests. A
    large response is written part by part, so that it counts until its client has taken nearly
    all of it. 429 takes its place if the owner has too many bytes. Streams do not say how long they
    are, so their bytes are not counted.
    """

    def __init__(self, app: ASGIApp, service: RouterService) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        owner, memory = record_of(scope).owner, self._service.bodies
        size, is_refused = 0, False

        async def in_parts(message: Message) -> None:
            nonlocal size, is_refused
            if message["type"] == "http.response.start":
                large = _large_size(message)
                try:
                    memory.hold_response(owner, large)
                except OverloadedError as exc:
                    is_refused = True
                    return await error_answer(self._service, exc, scope)(scope, receive, send)
                size = large
            elif is_refused:
                return
            elif size:
                body = message.get("body", b"")
                for start in range(0, len(body) - PART_BYTES, PART_BYTES):
                    part = body[start : start + PART_BYTES]
                    await send({**message, "body": part, "more_body": True})
                message = {**message, "body": body[(len(body) - 1) // PART_BYTES * PART_BYTES :]}
            await send(message)

        with self._service.dispatcher.admission.serving(owner):
            try:
                await self._app(scope, receive, in_parts)
            finally:
                memory.give_back(owner, size)


def _large_size(start: Message) -> int:
    """Return the bytes of a response's body, 0 if they need not be counted."""
    size = next((value for name, value in start["headers"] if name == b"content-length"), b"0")
    return int(size) if int(size) > UNCOUNTED_BYTES else 0
