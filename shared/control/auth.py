"""Derives CURVE keys from the cluster secret, and refuses ZeroMQ clients that lack them.

All members of a cluster have the same key pair. A server accepts only clients that prove to have it
as well, so a stranger can neither send nor receive a message; traffic is encrypted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from pagewire.shared.control.loop_socket import LoopSocket

logger = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_DOMAIN = b"pagewire"
_HANDSHAKE_TIMEOUT_MS = 5000

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The cluster's CURVE key pair, both in Z85 (40 bytes)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def derive(cls, cluster_secret: str) -> ClusterKeys:
        """Return the key pair, which is the same for everyone who has the cluster secret."""
        raw = hashlib.blake2b(
            cluster_secret.encode(), digest_size=32, person=b"pagewire-curve"
        ).digest()
        secret = z85.encode(raw)
        return cls(public=zmq.curve_public(secret), secret=secret)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before its bind, a CURVE server; its context needs a `ZapHandler`."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.zap_domain = _ZAP_DOMAIN
        socket.handshake_ivl = _HANDSHAKE_TIMEOUT_MS

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket, before its connect, a CURVE client."""
        socket.curve_serverkey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.handshake_ivl = _HANDSHAKE_TIMEOUT_MS


def explain_failure(event: int, value: int) -> str:
    """Return why a connection failed before or in its handshake, as far as that is known.

    Args:
        event: an event of a socket monitor.
        value: the event's value.
    """
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "authentication failed: is the cluster secret the same on both sides?"
    # A server closes the connection of a client with a wrong key and says nothing: EPIPE. So does
    # the kernel for a process that dies, unless bytes of ours lie unread there: ECONNRESET.
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EPIPE:
        return (
            "the handshake was closed: authentication failed (is the cluster secret the same on "
            "both sides?), or the process has just ended"
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "the handshake failed: what listens there does not belong to this cluster"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.ECONNRESET:
        return "the connection was lost in the handshake: the process has probably died"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return no_answer(_HANDSHAKE_TIMEOUT_MS / 1000)
    if event == zmq.EVENT_DISCONNECTED:
        return "the connection was closed before the handshake: is this a Pagewire service?"
    return "nobody listens there"


def no_answer(seconds: float) -> str:
    """Return the message for a peer that accepted the connection and then sent nothing."""
    return f"connected, but no answer within {seconds:g} s: the process is frozen or overloaded"


class ZapHandler:
    """Answers libzmq's question whether a client may connect (ZeroMQ RFC 27).

    libzmq asks on an endpoint that exists once per context, so each server has its own context. The
    handler runs in the event loop; its owner calls `close` before it ends the context.

    Attributes:
        denied: clients turned away so far.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys) -> None:
        self.denied = 0
        self._allowed = z85.decode(keys.public)
        socket = context.socket(zmq.REP)
        try:
            socket.linger = 0
            socket.bind(_ZAP_ENDPOINT)
        except zmq.ZMQError:
            socket.close()
            raise
        self._link = LoopSocket(socket, self._on_request)

    def close(self) -> None:
        """Stop answering: from now on, no further client can connect."""
        self._link.close()

    def _on_request(self, frames: list[bytes]) -> None:
        # Frames: version, request id, domain, address, identity, mechanism, credentials.
        request_id = frames[1] if len(frames) > 1 else b""
        allowed = (
            len(frames) == 7
            and frames[0] == _ZAP_VERSION
            and frames[2] == _ZAP_DOMAIN
            and frames[5] == b"CURVE"
            and hmac.compare_digest(frames[6], self._allowed)
        )
        if not allowed:
            self.denied += 1
            logger.debug("refused a client without the cluster's key")
        status = [b"200", b"OK"] if allowed else [b"400", b"denied"]
        self._link.send([_ZAP_VERSION, request_id, *status, b"", b""])
