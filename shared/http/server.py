"""uvicorn's server, for a process that handles signals itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from pagewire.shared.http.connections import Connections

DATE_INTERVAL_S = 1.0


class HttpServer(uvicorn.Server):
    """Serves one port until `should_exit` is set.

    Args:
        connections: the bounds and counts of the port's connections.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        self._exits = asyncio.Event()
        super().__init__(config)
        self._connections = connections

    @property
    def should_exit(self) -> bool:
        """Whether the server is to end; set it in the event loop."""
        return self._exits.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exits.set()
        else:
            self._exits.clear()

    async def main_loop(self) -> None:
        """Refresh the header `Date` until the server is to end.

        uvicorn's own loop wakes up ten times a second, which takes a quarter of an idle worker's
        time.
        """
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_INTERVAL_S):
                    await self._exits.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again once it has shut down."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and wait for the requests that run."""
        # uvicorn ends only the connections that it knows by now: some are just being accepted.
        self._connections.is_closing = True
        await super().shutdown(sockets)
