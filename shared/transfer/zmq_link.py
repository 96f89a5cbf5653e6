"""ZeroMQ sockets that move large frames without copies, served by the asyncio event loop.

A reader only reads its socket and a writer only writes to its own, which keeps libzmq's
edge-triggered file descriptor simple: whatever is left to do is found by doing it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from pagewire.shared.channel_auth import HANDSHAKE_FAILURES, explain_failure
from pagewire.shared.errors import TransferError
from pagewire.shared.loop_socket import watch_connection

_BATCH = 64  # messages handled before other callbacks of the loop get their turn
_OUTBOX = 4096  # messages to a peer, in front of those that libzmq takes
_RETRY_S = 0.002  # while libzmq's queue to a peer is full
_TRACKER_PERIOD_S = 0.0005

_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKE_FAILURES


class FrameReader:
    """Hands the frames of each message of a socket to a callback. Owns the socket.

    Args:
        socket: bound; nothing is sent on it.
        on_frames: gets one message. It must not raise.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], on_frames: Callable[[Sequence[zmq.Frame]], None]
    ) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._turn: asyncio.Handle | None = self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Close the socket; what it has not handed out is lost."""
        self._loop.remove_reader(self._fd)
        if self._turn is not None:
            self._turn.cancel()
        self._socket.close(linger=0)

    def _drain(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        for _ in range(_BATCH):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._turn = None
                return
            self._on_frames(frames)
        self._turn = self._loop.call_soon(self._drain)


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A message that libzmq has not taken yet.

    Attributes:
        taken: resolves when it has, to what tells when the memory is no longer needed.
    """

    frames: list[bytes | memoryview]
    taken: asyncio.Future[zmq.MessageTracker]


class FrameWriter:
    """The way to one peer: sends in order and without waiting. Owns the socket.

    It connects once. A second connection would hide what the first one has lost.

    Args:
        socket: not connected yet; nothing is received on it.
        on_lost: called once when the connection is lost, or the queue to the peer is full.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_lost: Callable[[str], None]) -> None:
        socket.reconnect_ivl = -1
        self._socket = socket
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[_Outgoing] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._monitor = watch_connection(socket, _CONNECTED | _LOST, self._on_event)
        self._lost = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._socket.closed)

    async def connect(self, endpoint: str) -> None:
        """Wait for the other side to take us.

        Raises:
            TransferError: nobody listens there, or they turn us away.
        """
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as exc:
            raise TransferError(f"cannot connect to {endpoint!r}: {exc}") from exc
        await self._connected

    def post(self, frames: list[bytes | memoryview]) -> asyncio.Future[zmq.MessageTracker]:
        """Queue a message; what is returned resolves when libzmq has taken it.

        It is cancelled if the way is given up before.
        """
        outgoing = _Outgoing(frames, self._loop.create_future())
        if self.closed or len(self._outbox) >= _OUTBOX:
            outgoing.taken.cancel()
            self._lose(f"{_OUTBOX} messages are unread")
            return outgoing.taken
        self._outbox.append(outgoing)
        if self._retry is None:
            self._flush()
        return outgoing.taken

    async def push(self, frames: list[bytes | memoryview]) -> None:
        """Send a message; returns when its memory is no longer needed.

        Raises:
            TransferError: the way was given up meanwhile.
        """
        taken = self.post(frames)
        await asyncio.wait({taken})
        if not taken.cancelled():
            tracker = taken.result()
            while not tracker.done:  # noqa: ASYNC110 - libzmq's own threads set it
                await asyncio.sleep(_TRACKER_PERIOD_S)
        if self.closed or taken.cancelled():
            raise TransferError("the way to the peer was given up")

    def close(self, linger_ms: int) -> None:
        """Close the socket; what libzmq has may leave for `linger_ms` more. Idempotent."""
        if self.closed:
            return
        if self._retry is not None:
            self._retry.cancel()
        for outgoing in self._outbox:
            outgoing.taken.cancel()
        self._outbox.clear()
        self._connected.cancel()
        # In this order: libzmq's I/O thread waits for good to tell a closed monitor something.
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=linger_ms)

    def _flush(self) -> None:
        self._retry = None
        while self._outbox:
            outgoing = self._outbox[0]
            try:
                tracker = self._socket.send_multipart(
                    outgoing.frames, zmq.NOBLOCK, copy=False, track=True
                )
            except zmq.Again:
                self._retry = self._loop.call_later(_RETRY_S, self._flush)
                return
            except zmq.ZMQError as exc:
                self._lose(f"ZeroMQ: {exc}")
                return
            self._outbox.popleft()
            if tracker is not None and not outgoing.taken.done():
                outgoing.taken.set_result(tracker)

    def _on_event(self, event: int, value: int) -> None:
        if event == _CONNECTED:
            if not self._connected.done():
                self._connected.set_result(None)
        elif not self._connected.done():
            self._connected.set_exception(TransferError(explain_failure(event, value)))
        else:
            self._lose("the connection was lost")

    def _lose(self, reason: str) -> None:
        if not self._lost and not self.closed:
            self._lost = True
            self._on_lost(reason)
