"""Accepts connections from a socket that several routers share, a few at a time.

Without a limit, the first event loop that finds a queue of connections would accept all of them.
So each router accepts a few and then pauses, while the others do the same. A router without room
pauses first, so that it refuses connections only if no other router accepts them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from pagewire.shared.base.aio import start_task

logger = logging.getLogger(__name__)

BATCH = 4
PAUSE_S = 0.001  # the finest that libuv's timers have
FULL_PAUSE_S = 0.05
REST_S = 1.0  # when there are no file descriptors left


class Acceptor:
    """Feeds connections to protocols, as `asyncio.Server` does.

    Args:
        listener: bound; listens from now on. Not closed here.
        backlog: connections that may wait to be accepted.
        make_protocol: called for each connection.
        is_full: whether it would refuse one.
    """

    def __init__(
        self,
        listener: socket.socket,
        backlog: int,
        make_protocol: Callable[[], asyncio.Protocol],
        is_full: Callable[[], bool],
    ) -> None:
        self._listener, self._make_protocol, self._is_full = listener, make_protocol, is_full
        self._has_stood_back = False
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        listener.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Accept no more; connections that were accepted stay. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait until each accepted connection has its protocol."""
        if self._opening:
            await asyncio.wait(set(self._opening))

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_readable)

    def _on_readable(self) -> None:
        if self._is_full() and not self._has_stood_back:
            self._has_stood_back = True
            self._rest(FULL_PAUSE_S)
            return
        self._has_stood_back = False
        pause_s = PAUSE_S
        for _ in range(BATCH):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # others were faster, or it left
                break
            except OSError as exc:
                logger.warning("cannot accept connections: %s", exc.strerror)
                pause_s = REST_S
                break
            task = start_task(self._open(connection), "new connection")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        self._rest(pause_s)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._resume)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has left already
            connection.close()
