"""The server's end of the control channel."""

from __future__ import annotations

import asyncio
import logging
import socket as std_socket
import time
from collections import OrderedDict
from collections.abc import Callable

import zmq

from pagewire.shared.base.errors import ConfigError, ProtocolError, VersionMismatchError
from pagewire.shared.base.logs import Complaints
from pagewire.shared.control.auth import ClusterKeys, ZapHandler
from pagewire.shared.control.client import CLIENT_ID
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

MAX_PEERS = 1024

_CLOSE_LINGER_MS = 200
_PROBE_DELAY_S = 0.01
_LATE_PROBES = 2  # one may follow the first at once
_WARN_INTERVAL_S = 5.0
_DEPARTURES_S = 60.0  # between lines about connections of one client that end


class ControlServer:
    """Receives messages of many clients and sends messages to each.

    Args:
        bind_host: name or address of the interface to listen on.
        port: 0 takes a free one.
        worker_id, epoch: sent in each `Pong`; the epoch is at least 1.
        on_message: called with peer id and message, in order per peer. Pings are answered here
            and not passed on.
        on_peer_lost: called once for each lost client, whose requests must then be cancelled.
        lease_s: silence after which a client counts as lost.
        heartbeat_s: how often silence is checked.

    Attributes:
        malformed_frames: frames dropped because they are not messages.
        other_version_frames: frames dropped because their sender speaks another protocol version.
    """

    def __init__(
        self,
        bind_host: str,
        port: int,
        keys: ClusterKeys,
        worker_id: str,
        epoch: int,
        on_message: Callable[[str, ControlMessage], None],
        on_peer_lost: Callable[[str], None],
        *,
        lease_s: float = 5.0,
        heartbeat_s: float = 1.0,
    ) -> None:
        if epoch <= FORGOTTEN_EPOCH:
            raise ValueError(f"an epoch is at least {FORGOTTEN_EPOCH + 1}, not {epoch}")
        self.malformed_frames = 0
        self.other_version_frames = 0
        self._bind_host, self._port, self._keys = bind_host, port, keys
        self._on_message, self._on_peer_lost = on_message, on_peer_lost
        self._lease_s, self._heartbeat_s = lease_s, heartbeat_s
        self._pong = encode(Pong(worker_id=worker_id, epoch=epoch))
        self._goodbye = encode(Pong(worker_id=worker_id, epoch=FORGOTTEN_EPOCH))
        self._last_seen: dict[bytes, float] = {}
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        self._departures = Complaints(logger, logging.INFO, _DEPARTURES_S)
        self._next_warning = 0.0
        self._next_version_warning = 0.0
        self._probe: asyncio.TimerHandle | None = None
        self._probes_due = 0  # with the next heartbeats
        # libzmq has one authentication endpoint a context: each server has a context of its own.
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._zap: ZapHandler | None = None
        self._link: LoopSocket | None = None
        self._monitor: LoopSocket | None = None
        self._ticker: Ticker | None = None

    @property
    def denied_clients(self) -> int:
        """Clients refused because they do not have the cluster's key."""
        return 0 if self._zap is None else self._zap.denied

    @property
    def peers(self) -> tuple[str, ...]:
        """Ids of the clients that are connected and alive."""
        return tuple(peer.decode() for peer in self._last_seen)

    async def start(self) -> str:
        """Listen; return the endpoint, e.g. "tcp://127.0.0.1:34567".

        Raises:
            ConfigError: the address cannot be bound.
        """
        address = await _resolve(self._bind_host, self._port)
        self._context = zmq.Context()
        try:
            self._zap = ZapHandler(self._context, self._keys)
            socket = self._context.socket(zmq.ROUTER)
            self._link = LoopSocket(socket, self._on_frames)
            self._configure(socket, address)
            self._monitor = watch_connection(socket, zmq.EVENT_DISCONNECTED, self._on_disconnect)
            try:
                socket.bind(f"tcp://{address}:{self._port}")
            except zmq.ZMQError as exc:
                raise ConfigError(
                    f"cannot listen on {self._bind_host} port {self._port}: {exc.strerror}; "
                    "choose another port, or 0 for a free one"
                ) from exc
            endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:  # cancelled, too: nothing may stay open
            await self.close()
            raise
        self._ticker = Ticker(self._heartbeat_s, self._on_tick)
        return endpoint

    def post(self, peer_id: str, message: ControlMessage) -> bool:
        """Queue a message to a client.

        Returns:
            False if the client is lost, which `on_peer_lost` reports or has reported. A client that
            does not read fast enough counts as lost.

        Raises:
            ProtocolError: the message is larger than any peer accepts.
        """
        peer = peer_id.encode()
        frame = encode(message)
        return peer in self._last_seen and self._send_known(peer, frame)

    async def close(self) -> None:
        """Stop listening and forget all clients, without reporting them lost. Idempotent."""
        if self._ticker is not None:
            self._ticker.close()
        if self._probe is not None:
            self._probe.cancel()
        if self._monitor is not None and self._link is not None and not self._link.closed:
            self._link.socket.disable_monitor()
            self._monitor.close()
        if self._link is not None:
            self._link.close(_CLOSE_LINGER_MS)
        if self._zap is not None:
            self._zap.close()
        self._last_seen.clear()
        context, self._context = self._context, None
        if context is not None:
            # Waits for the lingering sockets, hence not in the loop's thread.
            await asyncio.to_thread(context.term)

    def _configure(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._keys.secure_server(socket)
        bound_queues(socket, MAX_FRAME_BYTES)
        socket.ipv6 = ":" in address
        socket.router_mandatory = True
        # libzmq's own heartbeats close the connection of a frozen client and free its queue.
        socket.heartbeat_ivl = max(1, int(self._heartbeat_s * 1000))
        socket.heartbeat_timeout = max(1, int(self._lease_s * 1000))

    def _on_frames(self, frames: list[bytes]) -> None:
        peer = frames[0]
        if len(frames) != 2 or not CLIENT_ID.fullmatch(peer):
            self._count_malformed(peer, "not one frame, or no valid client id")
            return
        try:
            message = decode(frames[1])
        except VersionMismatchError as exc:
            self._on_other_version(peer, exc)
            return
        except ProtocolError as exc:
            self._count_malformed(peer, str(exc))
            return
        if peer not in self._last_seen and not self._welcome(peer):
            return
        self._last_seen[peer] = time.monotonic()
        if isinstance(message, Ping):
            self._send_known(peer, self._pong)
        else:
            self._on_message(peer.decode(), message)

    def _welcome(self, peer: bytes) -> bool:
        """Whether to accept an unknown client; if not, it is notified that it is forgotten."""
        if peer in self._forgotten or len(self._last_seen) >= MAX_PEERS:
            self._try_send(peer, self._goodbye)
            return False
        return True

    def _send_known(self, peer: bytes, frame: bytes) -> bool:
        problem = self._try_send(peer, frame)
        if problem is not None:
            self._forget(peer, problem)
        return problem is None

    def _try_send(self, peer: bytes, frame: bytes) -> str | None:
        """Queue a frame, or return why that is impossible."""
        if self._link is None or self._link.closed:
            return "this server is closed"
        try:
            self._link.send([peer, frame])
        except zmq.Again:
            return "its queue is full"
        except zmq.ZMQError as exc:
            return exc.strerror
        return None

    def _forget(self, peer: bytes, reason: str) -> None:
        if self._last_seen.pop(peer, None) is None:
            return
        self._forgotten[peer] = None
        if len(self._forgotten) > MAX_PEERS:
            self._forgotten.popitem(last=False)
        name = peer.decode()
        logger.debug("connection %s is gone: %s", name, reason)
        client = name.rpartition(".")[0] or name  # see `make_client_id`
        self._departures.say(client, 0, f"control client {client} is gone: {reason}")
        # In an iteration of its own: `post` may be in the middle of its caller's bookkeeping.
        asyncio.get_running_loop().call_soon(self._report_lost, name)

    def _report_lost(self, name: str) -> None:
        if self._context is not None:
            self._on_peer_lost(name)

    def _on_disconnect(self, event: int, value: int) -> None:
        # libzmq does not say who left, and drops the route after the event: mostly at once, but an
        # overloaded machine may take longer, hence further probes.
        self._probes_due = _LATE_PROBES
        if self._probe is None:
            loop = asyncio.get_running_loop()
            self._probe = loop.call_later(_PROBE_DELAY_S, self._probe_peers)

    def _probe_peers(self) -> None:
        self._probe = None
        if self._link is not None and not self._link.closed:
            for peer in list(self._last_seen):
                self._send_known(peer, self._pong)

    def _on_tick(self) -> None:
        if self._link is not None:
            self._link.drain()
        if self._probes_due > 0 and self._probe is None:
            self._probes_due -= 1
            self._probe_peers()
        deadline = time.monotonic() - self._lease_s
        for peer, seen in list(self._last_seen.items()):
            if seen < deadline:
                self._forget(peer, f"silent for {self._lease_s:g} s")

    def _on_other_version(self, peer: bytes, exc: VersionMismatchError) -> None:
        """Answer, so that the client learns our version from the frame's first byte."""
        self.other_version_frames += 1
        self._try_send(peer, self._goodbye)
        now = time.monotonic()
        if now >= self._next_version_warning:
            self._next_version_warning = now + _WARN_INTERVAL_S
            logger.warning("refused the connection of %r: %s", peer.decode(), exc)

    def _count_malformed(self, peer: bytes, reason: str) -> None:
        self.malformed_frames += 1
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + _WARN_INTERVAL_S
            logger.warning(
                "dropped a malformed frame from %r (%d so far): %s",
                peer[:64],
                self.malformed_frames,
                reason,
            )


async def _resolve(host: str, port: int) -> str:
    """Return the address of a host name, since libzmq binds to addresses only.

    Raises:
        ConfigError: the name has no address here.
    """
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host, port, type=std_socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}: {exc.strerror}; name an address") from exc
    address = str(infos[0][4][0])
    return f"[{address}]" if ":" in address else address
