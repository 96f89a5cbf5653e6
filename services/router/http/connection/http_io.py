"""Reads request bodies, notices clients that leave, and sends streams."""

from __future__ import annotations

import asyncio
import codecs
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pagewire.services.router.http import api_errors
from pagewire.services.router.http.api.openai.answer_set import AnswerSet
from pagewire.services.router.http.api.openai.formats import Format
from pagewire.services.router.http.connection.direct_writer import direct_writer
from pagewire.services.router.http.connection.error_forms import end_with_error
from pagewire.services.router.http.connection.record import record_of
from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import OverloadedError, PagewireError
from pagewire.shared.base.shares import is_within_share
from pagewire.shared.text.answer_text import TextDelta

T = TypeVar("T")

MAX_BODY_BYTES = 16 << 20
MAX_BODIES_BYTES = 256 << 20  # of an owner's bodies together, beyond the first bytes of each
UNCOUNTED_BYTES = 64 << 10  # the first ones of each body
BODY_TIMEOUT_S = 60.0
BODY_SILENCE_S = 10.0  # without a byte of it


class BodyMemory:
    """Bounds the memory of bodies: of requests that arrive and are read, of responses until taken.

    One owner alone may use `limit`; then others may still use some, see `is_within_share`. A
    response is complete when it is counted, and its computing would be in vain if it were refused:
    so it may go beyond that if what its owner holds so far does not.

    Bytes are counted, not requests, so that a client that sends slowly does not block others. The
    first `UNCOUNTED_BYTES` of each body are not: the number of connections bounds them, and usual
    requests are read even while large bodies take all the rest.

    Attributes:
        held: bytes in use now.
        limit: most bytes of one owner in use at once.
    """

    def __init__(self, limit: int = MAX_BODIES_BYTES) -> None:
        self.limit = limit
        self.held = 0
        self._of_owner: Counter[str] = Counter()

    def grow(self, owner: str, before: int, after: int) -> None:
        """Count the bytes by which a body grows.

        Args:
            owner: of the request.
            before: its size so far.
            after: its size with what has arrived.

        Raises:
            OverloadedError: see `check`.
        """
        nbytes = _counted(after) - _counted(before)
        if nbytes:
            self.check(owner, nbytes)
            self._add(owner, nbytes)

    def hold_response(self, owner: str, size: int) -> None:
        """Count a response's body.

        Raises:
            OverloadedError: see `check`.
        """
        if nbytes := _counted(size):
            self.check(owner)
            self._add(owner, nbytes)

    def check(self, owner: str, nbytes: int = 1) -> None:
        """Check that an owner may hold more bytes.

        Raises:
            OverloadedError: the owner has too many, or all have.
        """
        own = self._of_owner[owner]
        if not is_within_share(self.limit, own + nbytes, self.held + nbytes):
            raise OverloadedError(f"{self.held} bytes of bodies are held, {own} of this owner")

    def _add(self, owner: str, nbytes: int) -> None:
        self.held += nbytes
        self._of_owner[owner] += nbytes

    def give_back(self, owner: str, size: int) -> None:
        """Stop counting a body of this size."""
        if not (nbytes := _counted(size)):
            return
        self.held -= nbytes
        self._of_owner[owner] -= nbytes
        if not self._of_owner[owner]:
            del self._of_owner[owner]


def _counted(size: int) -> int:
    return max(0, size - UNCOUNTED_BYTES)


@asynccontextmanager
async def received_body(request: Request, memory: BodyMemory) -> AsyncIterator[bytearray]:
    """Yield a request's body without a byte order mark; its memory counts until the block ends.

    Raises:
        BodyEncodingError: it is compressed.
        BodyTooLargeError: it has more than `MAX_BODY_BYTES`.
        OverloadedError: the bodies of all requests are too many, or those of this owner.
        BodyTimeoutError: it did not arrive in time.
        ClientGoneError: the client left.
    """
    body = bytearray()
    try:
        await _receive(request, body, memory)
        has_mark = body.startswith(codecs.BOM_UTF8)  # which some programs write before JSON
        yield body[len(codecs.BOM_UTF8) :] if has_mark else body
    finally:
        memory.give_back(record_of(request.scope).owner, len(body))


async def _receive(request: Request, body: bytearray, memory: BodyMemory) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        problem = f"Content-Encoding {encoding[:50]} is not supported: send the body uncompressed"
        raise api_errors.BodyEncodingError(problem)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    loop, owner = asyncio.get_running_loop(), record_of(request.scope).owner
    end = loop.time() + BODY_TIMEOUT_S
    try:
        async with asyncio.timeout(BODY_SILENCE_S) as silence:
            async for chunk in request.stream():
                silence.reschedule(min(loop.time() + BODY_SILENCE_S, end))
                if len(body) + len(chunk) > MAX_BODY_BYTES:
                    raise _too_large()
                memory.grow(owner, len(body), len(body) + len(chunk))
                body += chunk
    except TimeoutError as exc:
        raise api_errors.BodyTimeoutError(
            f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds, or nothing of it for "
            f"{BODY_SILENCE_S:g}"
        ) from exc
    except ClientDisconnect as exc:
        raise api_errors.ClientGoneError("the client left while it sent its request") from exc


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await something for a client; cancel it as soon as the client disconnects.

    Raises:
        ClientGoneError: the client left first.
    """
    task = asyncio.ensure_future(work)
    watcher = start_task(_wait_for_disconnect(receive), "disconnect watcher")
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise api_errors.ClientGoneError("the client left before it was answered")
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
        await end_task(watcher)


class EventStream(Response):
    """The answers to one request as server-sent events; closes them whatever happens.

    An event goes to the transport as soon as its tokens arrive. While the client does not read,
    events wait; they are then sent through ASGI, as are the beginning and the end.

    Args:
        first: the first event, already taken from `rest`.
        send_timeout_s: a client that reads nothing for this long is disconnected.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answers: AnswerSet,
        form: Format,
        first: tuple[int, TextDelta],
        rest: AsyncGenerator[tuple[int, TextDelta], None],
        send_timeout_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._answers, self._form = answers, form
        self._first, self._rest = first, rest
        self._send_timeout_s = send_timeout_s
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, as ASGI has it."""
        try:
            await cancel_on_disconnect(receive, self._send_all(scope, send))
        except api_errors.ClientGoneError:
            record = record_of(scope)
            if record.error is None:  # else it left before it had that error
                record.outcome = "cancelled"
        finally:
            self._answers.close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        record_of(scope).has_events = True
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        if (writer := direct_writer(scope)) is not None:
            writer.begin(self._form)
            self._answers.push_to(writer.push)
        try:
            async with aclosing(self._rest) as rest:
                await self._send_chunk(send, self._form.begin(self._answers.usage))
                await self._send_chunk(send, self._form.stream_chunk(*self._first))
                async for index, delta in rest:
                    await self._send_chunk(send, self._form.stream_chunk(index, delta))
            await self._send_chunk(send, self._form.last(self._answers.usage), last=True)
        except api_errors.ClientGoneError as exc:
            record_of(scope).fail(exc, "cancelled")
            return  # without the end of the body: the server closes the connection
        except PagewireError as exc:
            error, record = api_errors.describe(exc), record_of(scope)
            record.fail(exc, "failed" if error.status >= api_errors.SERVER_ERROR else "refused")
            await self._send_chunk(send, end_with_error(error, scope), last=True)

    async def _send_chunk(self, send: Send, chunk: bytes, last: bool = False) -> None:
        if chunk or last:
            await send_part(send, chunk, self._send_timeout_s, last=last)


async def send_part(send: Send, part: bytes, timeout_s: float, *, last: bool = False) -> None:
    """Send a part of a response's body, through ASGI.

    Raises:
        ClientGoneError: the client took nothing for so long.
    """
    message: Message = {"type": "http.response.body", "body": part, "more_body": not last}
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except TimeoutError as exc:
        raise api_errors.ClientGoneError(f"the client took nothing for {timeout_s:g} s") from exc


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left; what it sends until then means nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large() -> api_errors.BodyTooLargeError:
    return api_errors.BodyTooLargeError(f"the body has more than {MAX_BODY_BYTES} bytes")
