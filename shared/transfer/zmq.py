"""KV pieces over ZeroMQ, where UCX is not to be had: TCP, through host memory.

Every process binds one ROUTER, from which it only reads, and connects one DEALER per peer, to
which it only writes. A message is [session message] or [`Payload`, bytes]. With the cluster's keys
all of it is encrypted, and strangers are turned away before they can say anything.

Payloads leave from the caller's memory without a copy (twice as fast on two cores as with one),
those on a GPU by way of page-locked memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import ClassVar

import torch
import zmq

from pagewire.shared.addresses import numeric_endpoint, with_host
from pagewire.shared.channel_auth import ClusterKeys, ZapHandler
from pagewire.shared.errors import ConfigError, ProtocolError, TransferError
from pagewire.shared.transfer.peer import Landing, Peer
from pagewire.shared.transfer.session import SessionTransport
from pagewire.shared.transfer.staging import StagingPool
from pagewire.shared.transfer.wire import (
    MAX_MESSAGE_BYTES,
    Payload,
    SessionMessage,
    decode_message,
    encode_message,
)
from pagewire.shared.transfer.zmq_link import FrameReader, FrameWriter

logger = logging.getLogger(__name__)

_IO_THREADS = 2  # in and out at once
_QUEUED_IN_ZMQ = 16  # messages per peer and direction; payloads among them have a slot granted
_FRAME_OVERHEAD = 64  # bytes that encryption adds, rounded up
_LINGER_MS = 100  # for a last `Bye`
_UNLINK_TIMEOUT_S = 2.0
_INLINE_COPY_BYTES = 1 << 20  # larger ones are copied in a thread, the loop goes on meanwhile


class ZmqTransport(SessionTransport):
    """Pieces over ZeroMQ.

    Args:
        host: an address of this machine, a free port of which is bound.
        advertise_host: the name or address that peers reach it by; None: `host`.
        keys: the cluster's; without them anybody who reaches the port may send.
    """

    name: ClassVar[str] = "zmq"

    def __init__(
        self,
        worker_id: str,
        staging: StagingPool,
        *,
        host: str = "127.0.0.1",
        advertise_host: str | None = None,
        keys: ClusterKeys | None = None,
    ) -> None:
        super().__init__(worker_id, staging)
        self._host = host
        self._advertise_host = advertise_host or host
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._zap: ZapHandler | None = None
        self._reader: FrameReader | None = None
        self._writers: dict[Peer, FrameWriter] = {}
        self._pushes: dict[FrameWriter, set[asyncio.Future[None]]] = {}

    def fault_counts(self) -> dict[str, int]:
        """Return how often things went wrong so far, by kind."""
        denied = 0 if self._zap is None else self._zap.denied
        return {**super().fault_counts(), "denied": denied}

    def lane(self, peer_id: str) -> str:
        """Name the way to a peer."""
        return "tcp"

    async def _open(self) -> bytes:
        self._context = zmq.Context(_IO_THREADS)
        router = self._new_socket(zmq.ROUTER, ipv6=":" in self._host)
        if self._keys is not None:
            self._zap = ZapHandler(self._context, self._keys)
            self._keys.secure_server(router)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            router.bind(f"tcp://{host}:*")
        except zmq.ZMQError as exc:
            router.close(linger=0)
            raise ConfigError(
                f"cannot listen on {self._host} for KV blocks: {exc.strerror}; "
                "choose another --host (PAGEWIRE_HOST)"
            ) from exc
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._reader = FrameReader(router, self._on_frames)
        return with_host(endpoint, self._advertise_host).encode()

    def _new_socket(self, kind: int, *, ipv6: bool) -> zmq.Socket[bytes]:
        """Return a socket with bounded queues that takes nothing larger than a slot."""
        if self._context is None:
            raise TransferError("the ZeroMQ transport is not open")
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = _QUEUED_IN_ZMQ
        socket.maxmsgsize = max(self.staging.slot_bytes, MAX_MESSAGE_BYTES) + _FRAME_OVERHEAD
        socket.linger = 0
        socket.ipv6 = ipv6
        return socket

    async def _link(self, peer: Peer) -> None:
        try:
            endpoint = await numeric_endpoint(peer.address.endpoint.decode())
        except (ValueError, OSError) as exc:
            raise TransferError(f"no ZeroMQ endpoint: {peer.address.endpoint!r}") from exc
        socket = self._new_socket(zmq.DEALER, ipv6="[" in endpoint)
        if self._keys is not None:
            self._keys.secure_client(socket)
        writer = FrameWriter(socket, lambda reason: self._break(peer, reason))
        connected = False
        try:
            await writer.connect(endpoint)
            connected = True
        finally:
            if not connected:
                writer.close(linger_ms=0)
        self._writers[peer] = writer
        self._pushes[writer] = set()

    async def _unlink(self, peer: Peer) -> None:
        writer = self._writers.get(peer)
        if writer is None:
            return
        writer.close(_LINGER_MS)
        if pushes := self._pushes[writer]:
            _, stuck = await asyncio.wait(pushes, timeout=_UNLINK_TIMEOUT_S)
            if stuck:  # not seen so far
                logger.error("libzmq did not let go of %d payloads", len(stuck))
        if self._writers.get(peer) is writer:
            del self._writers[peer], self._pushes[writer]

    def _post(self, peer: Peer, message: SessionMessage) -> None:
        writer = self._writers.get(peer)
        if writer is not None and not writer.closed:
            writer.post([encode_message(message)])

    def _push(self, peer: Peer, seq: int, payload: torch.Tensor) -> asyncio.Future[None]:
        return asyncio.create_task(self._write(peer, seq, payload))

    async def _write(self, peer: Peer, seq: int, payload: torch.Tensor) -> None:
        writer = self._writers.get(peer)
        if writer is None or writer.closed:
            raise TransferError(f"there is no way to {peer.peer_id!r}")
        head = encode_message(Payload(peer.out, seq))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pushes = self._pushes[writer]
        pushes.add(ended)
        try:
            if payload.is_cuda:
                payload = await asyncio.to_thread(_to_pinned, payload)
            await writer.push([head, payload.numpy().data])
        finally:
            pushes.discard(ended)
            ended.set_result(None)

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> None:
        match frames:
            case [_, message]:
                self._on_message(message.buffer)
            case [_, head, body]:
                self._on_payload(head, body)
            case _:
                self.stats.note_malformed(f"a message of {len(frames)} frames")

    def _on_payload(self, head: zmq.Frame, body: zmq.Frame) -> None:
        try:
            message = decode_message(head.buffer)
        except ProtocolError as exc:
            self.stats.note_malformed(str(exc))
            return
        if not isinstance(message, Payload):
            self.stats.note_malformed(f"bytes behind a {type(message).__name__}")
            return
        claimed = self._claim(message.channel, message.seq, len(body))
        if claimed is not None:
            peer, landing = claimed
            self._arrivals.land(peer, landing, _fill(landing, body))

    async def _close_carrier(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._zap is not None:
            self._zap.close()
        if self._context is not None:
            await asyncio.to_thread(self._context.term)  # takes until the last `Bye` has gone


async def _fill(landing: Landing, body: zmq.Frame) -> None:
    """Copy a received frame into its slot."""
    source = torch.frombuffer(body.buffer, dtype=torch.uint8)
    target = landing.slot.buffer[: len(body)]
    if len(body) <= _INLINE_COPY_BYTES:
        target.copy_(source)
    else:
        await asyncio.to_thread(target.copy_, source)


def _to_pinned(payload: torch.Tensor) -> torch.Tensor:
    """Copy from a GPU to page-locked memory, which PyTorch keeps for the next one."""
    host = torch.empty(payload.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(payload)
    return host
