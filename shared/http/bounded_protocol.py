"""uvicorn's httptools protocol with deadlines, bounds and errors in JSON."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pagewire.shared.base.errors import ProtocolError
from pagewire.shared.http import proxy_header
from pagewire.shared.http.connections import Connections
from pagewire.shared.http.phases import Phase
from pagewire.shared.http.proxy_header import ProxyHeader
from pagewire.shared.http.refusals import (
    CODED_BEFORE_1_1,
    LARGE_HEADER,
    MALFORMED,
    MAX_HEADER_BYTES,
    MAX_HEADER_FIELDS,
    NO_ROOM,
    SLOW_HEADER,
    UNKNOWN_CODING,
    Refusal,
)

MAX_PIPELINED = 32  # requests that wait for the answer to an earlier one; each takes some KiB

_NO_PROXY = ProxyHeader(0, None)


def protocol_factory(
    kind: type[BoundedHttpProtocol], connections: Connections, trust_proxy: bool = False
) -> type[asyncio.Protocol]:
    """Return what `uvicorn.Config(http=...)` makes connections with.

    Args:
        kind: class of the protocol.
        connections: the port's connections.
        trust_proxy: use the client's address from a PROXY header before the first request.
    """
    factory = partial(kind, connections=connections, trust_proxy=trust_proxy)
    return cast("type[asyncio.Protocol]", factory)  # uvicorn only calls it


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    A response that begins before the request's body has arrived ends the connection. Further bytes
    are then read and dropped for a while: if a connection is closed with unread bytes, the response
    is lost.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
        trust_proxy: bool,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = connections
        self._proxy_bytes = b"" if trust_proxy else None  # None once no header is to come
        self._served: RequestResponseCycle | None = None  # self.cycle may be a later request's
        self._is_ending = self._is_stopping = self._is_last = False
        self._in_header = self._in_body = False
        self._wants_keep_alive = False
        self._header_bytes = self._header_fields = 0
        self._unparsed = 0  # bytes that have come since the parser last called
        self._unsent = 0  # bytes, when they were last looked at
        self._refusal = MALFORMED  # where the parser fails

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it if all others are being served."""
        if self._all.enter(self):
            super().connection_made(transport)
            if self._all.is_closing:
                self.shutdown()
            return
        self.transport, self._is_ending = transport, True
        transport.write(NO_ROOM.response())
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; its requests learn of it."""
        self._all.leave(self)
        if self._served is not None:
            _notify(self._served)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes that have arrived, within bounds."""
        if self._proxy_bytes is not None:
            data = self._after_proxy_header(self._proxy_bytes + data)
        if self._is_ending or self._is_last or not data:
            return
        self._unset_keepalive_if_required()
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self._is_last:
                self._end(self._refusal)
            return
        if self._unparsed > MAX_HEADER_BYTES:
            self._end(LARGE_HEADER)
        else:
            self._note_phase(Phase.HEADER)  # any bytes begin one, even an empty line

    def shutdown(self) -> None:
        """Close the connection once it serves no request."""
        self._is_stopping = True
        super().shutdown()

    def on_message_begin(self) -> None:
        """Begin a header, unless too many requests wait: then the last of them ends the connection.

        Raises:
            ProtocolError: too many wait; what follows is dropped, and the client sends it again.
        """
        if len(self.pipeline) >= MAX_PIPELINED:
            self._is_last = True
            self.cycle.keep_alive = False
            self.cycle.transport = _LingeringTransport(self)
            raise ProtocolError(f"more than {MAX_PIPELINED} requests wait")
        super().on_message_begin()
        self._in_header = True
        self._header_bytes = self._header_fields = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field. Trailers are counted and dropped."""
        self._header_fields += 1
        self._count_header(len(name) + len(value))
        if self._in_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let a request be served; unless its body comes first, its response is the last one.

        Raises:
            ProtocolError: the request is not one of HTTP/1.1, or not for this server.
        """
        self._check_framing()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ProtocolError("CONNECT is not supported: this server is not a proxy")
            return  # the request is parsed again as one without an upgrade
        super().on_headers_complete()
        self._in_header, self._in_body = False, True
        self._unparsed = 0
        self._wants_keep_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False
        self.cycle.transport = _LingeringTransport(self)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the body is complete."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_body = False
        self._unparsed = 0
        self.cycle.transport = self.transport
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._wants_keep_alive and not self._is_stopping

    def on_response_complete(self) -> None:
        """Wait for the next request, or serve it if it has arrived."""
        if not self._is_ending:
            super().on_response_complete()
            self._note_phase(Phase.HEADER if self._in_header else Phase.IDLE)

    def pause_writing(self) -> None:
        """Wait until the client reads what was sent."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._note_phase(Phase.TAKING)

    def resume_writing(self) -> None:
        """Continue: the client has read most of it."""
        super().resume_writing()
        self._note_phase(Phase.HEADER if self._in_header else Phase.IDLE)

    def on_overdue(self, phase: Phase) -> None:
        """End a connection whose client has been too slow."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if phase is Phase.HEADER:
            self._end(SLOW_HEADER)
        elif phase is Phase.TAKING and self._unsent < before:  # the client reads, slowly
            self._all.move(self, None, self.loop.time())
            self._all.move(self, Phase.TAKING, self.loop.time())
        else:
            self.drop()

    def drop(self) -> None:
        """Close the connection at once, without an answer."""
        self._all.leave(self)
        self._is_ending = True
        self.transport.abort()

    @property
    def is_ending(self) -> bool:
        """Whether nothing more may be written."""
        return self._is_ending or self.transport.is_closing()

    def linger(self) -> None:
        """Close once the client has closed, or after a while. Idempotent."""
        if self.is_ending:
            return
        self._is_ending = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self._note_phase(Phase.ENDING)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self, data: bytes) -> None:
        """Feed the parser.

        Raises:
            HttpParserError: this is not HTTP/1.1.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            # An offer of HTTP/2, which need not be taken. The parser leaves its request's body out.
            method, headers = self.parser.get_method(), self.headers
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            fields = [b"%s: %s\r\n" % pair for pair in headers if pair[0] != b"upgrade"]
            head = b"%s %s HTTP/1.1\r\n%s\r\n" % (method, self.url, b"".join(fields))
            self._parse(head + data[exc.args[0] :])

    def _end(self, refusal: Refusal) -> None:
        """Answer an invalid request with an error, unless a request is being answered."""
        self._all.closed_early[refusal.reason] += 1
        served = self._served
        if served is not None and not served.response_complete:
            if served.response_started or served is not self.cycle:
                self.drop()
                return
            _notify(served)
        self.transport.write(refusal.response())
        self.linger()

    def _note_phase(self, otherwise: Phase) -> None:
        """Record what the connection waits for: `otherwise` if no request is being served."""
        phase: Phase | None
        if self._is_ending:
            phase = Phase.ENDING
        elif self.flow.write_paused:
            phase = Phase.TAKING
        elif self.cycle is None or self.cycle.response_complete:
            phase = otherwise
        else:
            phase = Phase.BODY if self._in_body else None
        self._all.move(self, phase, self.loop.time())

    def _check_framing(self) -> None:
        """Refuse a body whose end a server in front of this one may see elsewhere.

        HTTP/1.0 has no Transfer-Encoding: what ignores it there takes the body for a request. In
        later versions a body has an end if it is chunked last, and once; codings before that are
        not known here.
        """
        fields = [value for name, value in self.headers if name == b"transfer-encoding"]
        codings = [coding.strip(b" \t").lower() for coding in b",".join(fields).split(b",")]
        if not fields:
            return
        if self.parser.get_http_version() != "1.1":
            self._refusal = CODED_BEFORE_1_1
        elif codings == [b"chunked"]:
            return
        elif codings[-1] == b"chunked" and codings.count(b"chunked") == 1 and all(codings):
            self._refusal = UNKNOWN_CODING
        raise ProtocolError(self._refusal.message)

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES or self._header_fields > MAX_HEADER_FIELDS:
            self._refusal = LARGE_HEADER
            raise ProtocolError(LARGE_HEADER.message)

    def _after_proxy_header(self, data: bytes) -> bytes:
        """Return what follows a PROXY header, if there is one: the gateway's own may come bare."""
        try:
            header = proxy_header.parse(data) if proxy_header.may_begin(data) else _NO_PROXY
        except ProtocolError:
            self._all.closed_early[MALFORMED.reason] += 1
            self.drop()
            return b""
        if header is None:
            self._proxy_bytes = data
            return b""
        self._proxy_bytes = None
        self.client = header.client or self.client
        return data[header.num_bytes :]


class _LingeringTransport(asyncio.Transport):
    """The transport of a response while its request's body is still arriving."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        super().__init__()
        self._protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.is_ending

    def close(self) -> None:
        """Close later, since bytes may be unread."""
        self._protocol.linger()


def _notify(cycle: RequestResponseCycle) -> None:
    """Let a request learn that its client is gone."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
