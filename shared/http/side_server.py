"""A small HTTP server on a separate port, in addition to a process's main work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Scope

from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import ConfigError, ForeignPageError
from pagewire.shared.http.bounded_protocol import BoundedHttpProtocol, protocol_factory
from pagewire.shared.http.browser_check import BrowserCheck, BrowserRules
from pagewire.shared.http.connections import Connections
from pagewire.shared.http.refusals import error_object
from pagewire.shared.http.request_id import request_id_of
from pagewire.shared.http.server import HttpServer

STOP_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64  # scrapers, operators and health checks
KEEP_ALIVE_S = 5


class SideServer:
    """Serves routes on one socket, with bounds on its connections.

    Args:
        name: the port's name in the log.
        routes: the application's routes.

    Attributes:
        connections: the port's connections.
    """

    def __init__(self, name: str, routes: Sequence[BaseRoute]) -> None:
        self._name = name
        self.connections = Connections(name, MAX_CONNECTIONS, KEEP_ALIVE_S)
        self._app = Starlette(routes=list(routes))
        self._listener: socket.socket | None = None
        self._server: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, listener: socket.socket, names: Iterable[str] = ()) -> None:
        """Accept connections.

        Args:
            listener: a bound socket, which is closed with the server.
            names: of this server besides local ones, see `BrowserRules`.
        """
        self._listener = listener
        config = uvicorn.Config(
            BrowserCheck(self._app, BrowserRules(listener, names), _refuse),
            http=protocol_factory(BoundedHttpProtocol, self.connections),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            backlog=MAX_CONNECTIONS,  # asyncio accepts as many at once
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = HttpServer(config, self.connections)
        self._task = start_task(self._server.serve(sockets=[listener]), f"server of {self._name}")

    async def close(self) -> None:
        """Stop listening and end all connections. Idempotent."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
            await end_task(self._task)
        if self._listener is not None:
            self._listener.close()


def _refuse(refusal: ForeignPageError, scope: Scope) -> Response:
    request_id = request_id_of(scope["headers"])
    body = error_object(refusal.message, "invalid_request_error", None, refusal.code, request_id)
    return Response(body, 403, media_type="application/json")


async def listening_socket(host: str, port: int, option: str, purpose: str) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: name or address; empty means all.
        port: 0 takes a free one.
        option: the command line option that chooses the port, for the error.
        purpose: the port's purpose, for the error.

    Raises:
        ConfigError: the port is in use, or the host has no address.
    """
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, address = infos[0][0], infos[0][4]
        # All addresses are those of both families, as for the control server.
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {host} port {port} for {purpose}: {exc.strerror}; "
            f"choose another {option}, or 0 for a free one"
        ) from exc
