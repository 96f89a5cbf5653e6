"""The small HTTP server that shows one process's own metrics and its health."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pagewire.shared.base.addresses import with_host
from pagewire.shared.http.connections import ConnectionCollector
from pagewire.shared.http.side_server import SideServer, listening_socket
from pagewire.shared.metrics.process import LoopLag, describe_process


class MetricsServer:
    """Serves `/metrics` and `/health` of one process.

    Args:
        registry: what is shown; this process's and this port's own numbers are added to it.
        is_healthy: whether `/health` answers 200.
        prefix: of the names of the metrics of the connections.
        restarts: how often a supervisor has started this process again.
        routes: further ones of this process.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        is_healthy: Callable[[], bool],
        prefix: str,
        restarts: int = 0,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        self._registry = registry
        self._is_healthy = is_healthy
        self._server = SideServer(
            "the metrics port",
            [Route("/metrics", self._metrics), Route("/health", self._health), *routes],
        )
        self._lag = LoopLag(registry)
        describe_process(registry, restarts)
        registry.register(ConnectionCollector(prefix, self._server.connections))

    async def start(self, host: str, port: int, names: Iterable[str] = ()) -> str:
        """Listen; return the base URL.

        Args:
            host: name or address; empty means all.
            port: 0 takes a free one.
            names: of this server besides local ones, see `BrowserRules`.

        Raises:
            ConfigError: the port is in use, or the host has no address.
        """
        listener = await listening_socket(host, port, "--metrics-port", "metrics")
        self._server.start(listener, names)
        self._lag.start()
        bound_host, bound_port = listener.getsockname()[:2]
        return with_host(f"http://:{bound_port}", bound_host)

    async def close(self) -> None:
        """Stop the server and the measurement of the event loop's lag."""
        self._lag.stop()
        await self._server.close()

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, _request: Request) -> Response:
        healthy = self._is_healthy()
        return JSONResponse({"ready": healthy}, status_code=200 if healthy else 503)
