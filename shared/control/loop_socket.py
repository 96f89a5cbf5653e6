"""ZeroMQ sockets that the asyncio event loop serves without a task or future per message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

# Messages handled in a row before other callbacks of the loop run.
_BATCH = 256
_SEND_QUEUE = 4096  # messages to one peer
_RECEIVE_QUEUE = 1024
_CURVE_OVERHEAD = 64  # bytes that encryption adds to a frame, rounded up
_READABLE = int(zmq.POLLIN)


class LoopSocket:
    """Passes each multipart message of a socket to a callback; sends without waiting.

    libzmq's file descriptor is edge-triggered and any call on the socket may swallow the edge, so
    after each send the socket is read once more in the loop's next iteration.

    Everything is called in the loop's thread. The socket belongs to this object, which closes it.

    Args:
        socket: bound or about to be bound or connected.
        on_frames: gets the frames of one message. Its exceptions are logged with a traceback, and
            the next message is handled.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        self._loop.add_reader(self._fd, self.drain)
        self._wake()

    @property
    def closed(self) -> bool:
        """Whether the socket has been closed."""
        return self._closed

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message in libzmq.

        Raises:
            zmq.Again: the peer's queue is full.
            zmq.ZMQError: the socket is closed, or (ROUTER) no such peer is connected.
        """
        try:
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                # A send looks for freed room about once a millisecond only; this does it now.
                self.socket.getsockopt(zmq.EVENTS)
                self.socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            self._wake()

    def drain(self) -> None:
        """Handle what has arrived, up to a batch; the rest in the loop's next iteration."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        for _ in range(_BATCH):
            if self._closed:
                return
            try:
                frames = self._receive()
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except Exception:
                # A bug in the handling of one message must not end the service of all others.
                logger.exception("the handler of a ZeroMQ message failed")
            # `zmq.Again` says this, too, but pyzmq takes twice as long to raise it.
            if not (self._closed or int(self.socket.getsockopt(zmq.EVENTS)) & _READABLE):
                return
        self._wake()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; queued messages may be sent for `linger_ms` more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        self._loop.remove_reader(self._fd)
        self.socket.close(linger=linger_ms)

    def _receive(self) -> list[bytes]:
        """Return the frames of a message, in two thirds of the time that `recv_multipart` takes.

        Raises:
            zmq.Again: none has arrived.
        """
        frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame.bytes)
        return frames

    def _wake(self) -> None:
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self.drain)


class Ticker:
    """Calls back every period. A tick that comes late is skipped.

    After a delay, the loop has not yet read the messages that arrived meanwhile, so a late tick
    must not find peers silent.
    """

    def __init__(self, period_s: float, on_tick: Callable[[], None]) -> None:
        self._period_s, self._on_tick = period_s, on_tick
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(period_s, self._run)

    def close(self) -> None:
        """Stop the regular calls. Further calls of this do nothing."""
        self._handle.cancel()

    def _run(self) -> None:
        late = self._loop.time() - self._handle.when() > self._period_s
        self._handle = self._loop.call_later(self._period_s, self._run)
        if not late:
            self._on_tick()


def bound_queues(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    """Bound a socket's queues and the size of incoming messages; call before bind or connect."""
    socket.sndhwm = _SEND_QUEUE
    socket.rcvhwm = _RECEIVE_QUEUE
    socket.maxmsgsize = max_message_bytes + _CURVE_OVERHEAD
    socket.linger = 0


def watch_connection(
    socket: zmq.Socket[bytes], events: int, on_event: Callable[[int, int], None]
) -> LoopSocket:
    """Report a socket's connection events; the caller closes the result first, then the socket.

    Args:
        socket: the socket to watch.
        events: which events to report.
        on_event: gets an event and its value, see zmq_socket_monitor(3).
    """
    monitor = socket.get_monitor_socket(events)

    def on_frames(frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        if message["event"] & events:
            on_event(message["event"], message["value"])

    return LoopSocket(monitor, on_frames)
