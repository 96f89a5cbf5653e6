"""The sockets of links: a receiver binds one, a sender connects to it for each link.

The engine's thread uses and polls them; only the event loop decides who may connect (CURVE, ZAP). A
sender's sockets connect once and never again: a second connection would hide which messages the
first one lost. A lost connection is noticed by the next message that cannot be sent, or by an
acknowledgement that does not come. An idle link stays open until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import zmq

from pagewire.shared.base.addresses import with_host
from pagewire.shared.base.errors import ConfigError, ProtocolError, TransferError
from pagewire.shared.control.auth import ClusterKeys, ZapHandler
from pagewire.shared.transfer.messages import (
    MAX_MESSAGE_BYTES,
    ToReceiver,
    ToSender,
    decode_for_receiver,
    decode_for_sender,
    encode,
)
from pagewire.shared.transfer.transports.base import DONE, Pending

_IO_THREADS = 2  # in and out at once
_FRAME_OVERHEAD = 64  # bytes that encryption adds, rounded up
_QUEUED = 1024  # messages a link; one whose peer leaves more of them unread ends
TOKEN_BYTES = 16
_PAYLOADS = b"p"  # after the token of a link: its connection for payloads
MAX_MESSAGES_PER_POLL = 64


class KvSockets:
    """What the sockets of one endpoint share: the context, the keys, the size of a message.

    Make it in the event loop, which decides who may connect.

    Args:
        keys: the cluster's keys; without them, anyone who reaches the port may send.
        slot_bytes: size of a staging slot, which is that of the largest payload.
        timeout_s: a connection ends when libzmq's heartbeats had no answer for this long.
    """

    def __init__(self, keys: ClusterKeys | None, slot_bytes: int, timeout_s: float = 10.0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(_IO_THREADS)
        self._keys = keys
        self._largest = max(slot_bytes, MAX_MESSAGE_BYTES) + _FRAME_OVERHEAD
        self._timeout_ms = max(2, int(timeout_s * 1000))
        self._zap = ZapHandler(self._context, keys) if keys is not None else None

    @property
    def denied(self) -> int:
        """Number of clients that were turned away so far."""
        return 0 if self._zap is None else self._zap.denied

    def bind(self, host: str) -> zmq.Socket[bytes]:
        """Return a socket that listens for senders on a free port.

        Raises:
            ConfigError: this machine has no such address.
        """
        socket = self._new(zmq.ROUTER, ipv6=":" in host)
        socket.router_mandatory = True
        if self._keys is not None:
            self._keys.secure_server(socket)
        try:
            socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            raise ConfigError(
                f"cannot listen on {host} for KV blocks: {exc.strerror}; "
                "choose another --host (PAGEWIRE_HOST)"
            ) from exc
        return socket

    def connect(self, endpoint: str, token: bytes) -> zmq.Socket[bytes]:
        """Return a socket to a receiver, without waiting for the connection.

        Args:
            endpoint: has a numeric address, so that no name is looked up here.
            token: identifies the link at the receiver.

        Raises:
            TransferError: this is not an endpoint.
        """
        socket = self._new(zmq.DEALER, ipv6="[" in endpoint)
        socket.routing_id = token
        socket.reconnect_ivl = -1
        if self._keys is not None:
            self._keys.secure_client(socket)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            raise TransferError(f"cannot connect to {endpoint!r}: {exc}") from exc
        return socket

    def _new(self, kind: int, *, ipv6: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = _QUEUED
        socket.maxmsgsize = self._largest
        socket.heartbeat_timeout = self._timeout_ms
        socket.heartbeat_ivl = self._timeout_ms // 2
        socket.linger = 0
        socket.ipv6 = ipv6
        return socket

    def close(self) -> None:
        """End the context, and any socket that was left open."""
        if self._zap is not None:
            self._zap.close()
        self._context.destroy(linger=0)


@dataclass(frozen=True, slots=True)
class _Tracked:
    """A payload that libzmq reads until it has been sent."""

    tracker: zmq.MessageTracker

    def poll(self) -> bool:
        return bool(self.tracker.done)


class _Socket:
    """Owns a socket that the engine's thread polls.

    Attributes:
        fd: becomes readable when messages arrive; then all of them must be received.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.fd = int(socket.getsockopt(zmq.FD))

    def poll(self) -> bool:
        """Let libzmq handle what has come from the network; return whether a message is there."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        """Close the socket; messages that have not been sent are lost."""
        self._socket.close(linger=0)


class SenderSocket(_Socket):
    """A sender's end of a link: a connection, and another one once messages have payloads.

    So a first token does not wait until the payloads before it have been sent.

    Args:
        sockets: the endpoint's.
        endpoint, token: see `KvSockets.connect`.
        peer: name of the receiver.
    """

    def __init__(self, sockets: KvSockets, endpoint: str, token: bytes, peer: str) -> None:
        super().__init__(sockets.connect(endpoint, token))
        self.peer = peer
        self._connect = partial(sockets.connect, endpoint, token + _PAYLOADS)
        self._payloads: zmq.Socket[bytes] | None = None  # from the first payload on

    def post(self, message: ToReceiver, body: memoryview | None = None) -> Pending:
        """Send a message and, with it, bytes that stay untouched until the returned `Pending` ends.

        It is sent as soon as the receiver has accepted the connection.

        Raises:
            TransferError: the connection is lost, or does not keep up.
        """
        if self._socket.closed:
            raise TransferError("the link has ended")
        try:
            if body is None:
                self._socket.send(encode(message), zmq.NOBLOCK)
                return DONE
            self._payloads = self._payloads or self._connect()
            self._payloads.send(encode(message), zmq.NOBLOCK | zmq.SNDMORE)
            return _Tracked(self._payloads.send(body, zmq.NOBLOCK, copy=False, track=True))
        except zmq.ZMQError as exc:
            raise TransferError(f"the receiver takes no more messages: {exc.strerror}") from exc

    def close(self) -> None:
        """Close both connections; messages that have not been sent are lost."""
        super().close()
        if self._payloads is not None:
            self._payloads.close(linger=0)

    def receive(self) -> Iterator[ToSender]:
        """Yield the messages that have arrived.

        Raises:
            ProtocolError: one is malformed.
        """
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                raise ProtocolError(f"a KV message of {len(frames)} frames")
            yield decode_for_sender(frames[0])


class ReceiverSocket(_Socket):
    """The socket of all links of a receiver.

    Attributes:
        shared: the `KvSockets` that made it.
        endpoint: the address that senders connect to.
        num_malformed: messages that were malformed.
    """

    def __init__(self, sockets: KvSockets, host: str, advertise_host: str) -> None:
        """Open the socket, which listens on a free port.

        Raises:
            ConfigError: this machine has no such address.
        """
        super().__init__(sockets.bind(host))
        self.shared = sockets
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = with_host(bound, advertise_host)
        self.num_malformed = 0

    def send(self, token: bytes, message: ToSender) -> None:
        """Send a message to one sender.

        Raises:
            TransferError: its connection is gone, or it does not keep up.
        """
        try:
            self._socket.send_multipart([token, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            raise TransferError(f"the sender cannot be reached: {exc.strerror}") from exc

    def receive(self) -> Iterator[tuple[bytes, ToReceiver | ProtocolError, zmq.Frame | None]]:
        """Yield what has arrived: a sender's token, its message or the error in it, the payload."""
        for _ in range(MAX_MESSAGES_PER_POLL):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            token, body = frames[0].bytes[:TOKEN_BYTES], frames[2] if len(frames) == 3 else None
            data = frames[1].buffer if 2 <= len(frames) <= 3 else b""
            message: ToReceiver | ProtocolError
            try:
                message = decode_for_receiver(data)
            except ProtocolError as exc:
                self.num_malformed += 1
                message = exc
            yield token, message, body
