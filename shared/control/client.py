"""The client's end of the control channel."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable

import zmq

from pagewire.shared.base.addresses import numeric_endpoint
from pagewire.shared.base.errors import ChannelError, ProtocolError, VersionMismatchError
from pagewire.shared.control.auth import (
    HANDSHAKE_FAILURES,
    ClusterKeys,
    explain_failure,
    no_answer,
)
from pagewire.shared.control.loop_socket import LoopSocket, Ticker, bound_queues, watch_connection
from pagewire.shared.control.protocol import (
    FORGOTTEN_EPOCH,
    MAX_FRAME_BYTES,
    ControlMessage,
    Ping,
    Pong,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

CLIENT_ID = re.compile(rb"[!-~]{1,64}")

_MAX_ID_LENGTH = 64
_CLOSE_LINGER_MS = 200
_LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_BEGIN_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


def make_client_id(name: str) -> str:
    """Return a connection's id: the name, shortened if it must be, and a random part."""
    suffix = f".{secrets.token_hex(8)}"
    return name[: _MAX_ID_LENGTH - len(suffix)] + suffix


class ControlClient:
    """One connection to a server; after its loss the owner makes a new client.

    Args:
        endpoint: the server's endpoint.
        client_id: how the server names this client, see `make_client_id`; never used twice.
        on_message: called with each message except `Pong`s, in order.
        on_lost: called once, with the reason, if the connection ends after `connect` returned
            and before `close`.
        heartbeat_s: how often the server is pinged.
        lease_s: silence after which the server counts as lost.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClusterKeys,
        client_id: str,
        on_message: Callable[[ControlMessage], None],
        on_lost: Callable[[str], None],
        *,
        heartbeat_s: float = 1.0,
        lease_s: float = 5.0,
    ) -> None:
        if not CLIENT_ID.fullmatch(client_id.encode()):
            raise ValueError(f"a client id is 1 to 64 printable ASCII characters: {client_id!r}")
        self.endpoint, self.client_id = endpoint, client_id
        self._keys = keys
        self._on_message, self._on_lost = on_message, on_lost
        self._heartbeat_s, self._lease_s = heartbeat_s, lease_s
        self._ping = encode(Ping())
        self._server: Pong | None = None
        self._first_pong: asyncio.Future[Pong] | None = None
        self._reached = 0  # the last of `_BEGIN_EVENTS`
        self._last_seen = 0.0
        self._link: LoopSocket | None = None
        self._monitor: LoopSocket | None = None
        self._ticker: Ticker | None = None  # from the return of `connect` on
        self._ending = False
        self._reason = "it was closed here"

    @property
    def alive(self) -> bool:
        """Whether the server was reached and has not been lost since."""
        return self._server is not None and self._link is not None and not self._link.closed

    async def connect(self, timeout: float) -> Pong:
        """Connect to the server; return its first `Pong`, with worker id and epoch.

        Raises:
            ChannelError: no server listens or answers there, the cluster secrets differ, or the
                server speaks another protocol version.
        """
        if self._link is not None:
            raise ChannelError(f"the connection to {self.endpoint} was used before")
        self._first_pong = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                self._open(await numeric_endpoint(self.endpoint))
                pong = await self._first_pong
        except TimeoutError as exc:
            self._end()
            problem = no_answer(timeout) if self._reached else f"no connection in {timeout:g} s"
            raise ChannelError(f"{self.endpoint}: {problem}") from exc
        except OSError as exc:
            self._end()
            raise ChannelError(f"{self.endpoint} has no address: {exc.strerror}") from exc
        except BaseException:  # cancelled, or no message of the protocol's
            self._end()
            raise
        if self._ending:  # since the `Pong` came, in the same iteration of the loop
            raise ChannelError(f"{self.endpoint}: {self._reason}")
        self._ticker = Ticker(self._heartbeat_s, self._on_tick)
        return pong

    async def connect_to(self, worker_id: str, epoch: int, timeout: float) -> None:
        """Connect to one run of a worker.

        Raises:
            ChannelError: see `connect`; or another worker, or another run, is there now.
        """
        pong = await self.connect(timeout)
        if (pong.worker_id, pong.epoch) != (worker_id, epoch):
            self.close()
            raise ChannelError(f"{self.endpoint} now belongs to another worker")

    def post(self, message: ControlMessage) -> None:
        """Queue a message to the server.

        Raises:
            ChannelError: the connection is gone, or its queue is full.
            ProtocolError: the message is larger than any peer accepts.
        """
        if not self.alive:
            raise ChannelError(f"not connected to {self.endpoint}")
        self._send(encode(message))

    def close(self) -> None:
        """End the connection; messages that were posted just before are still sent. Idempotent."""
        self._end(_CLOSE_LINGER_MS)

    def _open(self, address: str) -> None:
        if self._ending:
            raise ChannelError(f"the connection to {self.endpoint} was closed")
        try:
            self._start(address)
        except zmq.ZMQError as exc:  # such as no file descriptor left
            raise ChannelError(f"cannot connect to {self.endpoint}: {exc.strerror}") from exc

    def _start(self, address: str) -> None:
        # Clients share a context: one I/O thread serves the connections to all servers.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.DEALER)
        self._link = LoopSocket(socket, self._on_frames)
        self._keys.secure_client(socket)
        bound_queues(socket, MAX_FRAME_BYTES)
        socket.ipv6 = "[" in address
        socket.routing_id = self.client_id.encode()
        socket.reconnect_ivl = -1  # a second connection would hide what the first one lost
        events = _BEGIN_EVENTS | HANDSHAKE_FAILURES | _LOST_EVENTS
        self._monitor = watch_connection(socket, events, self._on_event)
        socket.connect(address)

    def _send(self, frame: bytes) -> None:
        if self._link is None or self._link.closed:
            raise ChannelError(f"not connected to {self.endpoint}")
        try:
            self._link.send([frame])
        except zmq.Again as exc:  # libzmq's answer to both
            raise ChannelError(
                f"the connection to {self.endpoint} was closed, or its queue is full"
            ) from exc

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames[0])
        except VersionMismatchError as exc:
            self._fail(str(exc))
            return
        except ProtocolError as exc:
            # Members of one cluster don't send nonsense: nothing after it can be trusted.
            self._fail(f"a malformed frame: {exc}")
            return
        self._last_seen = time.monotonic()
        if isinstance(message, Pong):
            self._on_pong(message)
        else:
            self._on_message(message)

    def _on_pong(self, pong: Pong) -> None:
        if pong.epoch == FORGOTTEN_EPOCH:
            self._fail("the server does not know this client any more")
        elif self._server is None:
            self._server = pong
            if self._first_pong is not None and not self._first_pong.done():
                self._first_pong.set_result(pong)
        elif pong != self._server:
            self._fail("the server was restarted")

    def _on_event(self, event: int, value: int) -> None:
        if event & _BEGIN_EVENTS:
            self._reached = event
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._send_ping()
            return
        if self._link is not None:
            self._link.drain()  # handles messages that came before the end
        if self._reached == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._fail("the connection was closed")
        else:
            self._fail(explain_failure(event, value))

    def _on_tick(self) -> None:
        if self._link is None:
            return
        self._link.drain()
        if not self.alive:
            return
        if time.monotonic() - self._last_seen > self._lease_s:
            self._fail(f"silent for {self._lease_s:g} s")
            return
        self._send_ping()

    def _send_ping(self) -> None:
        try:
            self._send(self._ping)
        except ChannelError as exc:
            self._fail(str(exc))

    def _fail(self, reason: str) -> None:
        if self._ending:
            return
        self._end()
        self._reason = reason
        if self._ticker is not None:
            logger.info("lost the control server %s: %s", self.endpoint, reason)
            self._on_lost(reason)
        elif self._first_pong is not None and not self._first_pong.done():
            self._first_pong.set_exception(ChannelError(f"{self.endpoint}: {reason}"))

    def _end(self, linger_ms: int = 0) -> None:
        if self._ending:
            return
        self._ending = True
        if self._ticker is not None:
            self._ticker.close()
        if self._link is not None:
            if self._monitor is not None:
                self._link.socket.disable_monitor()
                self._monitor.close()
            self._link.close(linger_ms)
