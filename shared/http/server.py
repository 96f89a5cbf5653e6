"""uvicorn's server, for a process that handles signals itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from pagewire.shared.http.connections import Connections


class HttpServer(uvicorn.Server):
    """Serves one port until `should_exit` is set.

    Args:
        connections: those of the port.
    """

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again once it has shut down."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, and wait for the requests that run."""
        # uvicorn ends only the connections that it knows by now: some are just being accepted.
        self._connections.is_closing = True
        await super().shutdown(sockets)
