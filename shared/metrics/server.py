"""The small HTTP server that shows one process's own metrics and its health."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagewire.shared.addresses import with_host
from pagewire.shared.aio import end_task, start_task
from pagewire.shared.errors import ConfigError
from pagewire.shared.http.connections import ConnectionCollector, Connections
from pagewire.shared.http.protocol import BoundedHttpProtocol, protocol_factory

STOP_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64  # scrapers, routers and health checks
KEEP_ALIVE_S = 5


class MetricsServer:
    """Serves `/metrics` and `/health` of one process.

    Args:
        registry: what is shown; this port's connections are added to it.
        is_healthy: whether `/health` answers 200.
        prefix: of the names of the metrics of the connections.
    """

    def __init__(
        self, registry: CollectorRegistry, is_healthy: Callable[[], bool], prefix: str
    ) -> None:
        self._registry = registry
        self._is_healthy = is_healthy
        self._listener: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._connections = Connections("the metrics port", MAX_CONNECTIONS, KEEP_ALIVE_S)
        registry.register(ConnectionCollector(prefix, self._connections))

    async def start(self, host: str, port: int) -> str:
        """Listen; return the base URL.

        Raises:
            ConfigError: the port is in use, or the host has no address.
        """
        self._listener = listener = await _listen(host, port)
        app = Starlette(
            routes=[Route("/metrics", self._metrics), Route("/health", self._health)],
        )
        config = uvicorn.Config(
            app,
            http=protocol_factory(BoundedHttpProtocol, self._connections),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            backlog=MAX_CONNECTIONS,  # asyncio accepts as many at once
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _QuietServer(config)
        self._task = start_task(self._server.serve(sockets=[listener]), "metrics server")
        bound_host, bound_port = listener.getsockname()[:2]
        return with_host(f"http://:{bound_port}", bound_host)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
            await end_task(self._task)
        if self._listener is not None:
            self._listener.close()

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, _request: Request) -> Response:
        healthy = self._is_healthy()
        return JSONResponse({"ready": healthy}, status_code=200 if healthy else 503)


class _QuietServer(uvicorn.Server):
    """Leaves the process's signal handlers alone: the service has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _listen(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, address = found[0][0], found[0][4]
        # All addresses are those of both families, as for the control server.
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {host} port {port} for metrics: {exc.strerror}; "
            "choose another --metrics-port, or 0 for a free one"
        ) from exc
