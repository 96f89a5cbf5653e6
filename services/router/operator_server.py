"""The operator port: shows the cluster to people, to `pagewire` and to Prometheus.

Clients cannot reach it: a gateway forwards only to the HTTP endpoint. All routers that share the
port's socket give the same answers. Each router has its own metrics port; `/sd` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewire.services.router.dashboard.cluster_data import ClusterData
from pagewire.services.router.dashboard.pages import dashboard_routes
from pagewire.shared.base.addresses import with_host
from pagewire.shared.base.listener import inherited_socket
from pagewire.shared.http.side_server import SideServer, listening_socket
from pagewire.shared.settings.config import RouterSettings

OPERATOR_FD = "--operator-fd"
OPERATOR_PORT = "--operator-port"


class OperatorServer:
    """Serves `/cluster`, `/sd` and `/dashboard`.

    Args:
        cluster: the body of `/cluster`, see `RouterService.describe_cluster`.
        targets: the body of `/sd`.
        data: the body of `/dashboard/data`.
    """

    def __init__(
        self,
        cluster: Callable[[], dict[str, Any]],
        targets: Callable[[], list[dict[str, Any]]],
        data: ClusterData,
    ) -> None:
        self._cluster, self._targets = cluster, targets
        routes = [
            Route("/cluster", self._show_cluster),
            Route("/sd", self._show_targets),
            Route("/metrics", self._refuse_metrics),
            *dashboard_routes(data),
        ]
        self._server = SideServer("the operator port", routes)

    async def start(self, settings: RouterSettings) -> str:
        """Listen; return the base URL.

        Raises:
            ConfigError: the port is in use, or the file descriptor is not such a socket's.
        """
        if settings.operator_fd is not None:
            listener = inherited_socket(settings.operator_fd, OPERATOR_FD)
        else:
            port = settings.chosen_operator_port
            listener = await listening_socket(settings.host, port, OPERATOR_PORT, "operators")
        self._server.start(listener)
        host, port = listener.getsockname()[:2]
        return with_host(f"http://:{port}", host)

    async def close(self) -> None:
        """Stop listening."""
        await self._server.close()

    async def _show_cluster(self, _request: Request) -> Response:
        """Describe the cluster; 200 if it is ready."""
        body = self._cluster()
        return _json(body, 200 if body["status"] == "ok" else 503)

    async def _show_targets(self, _request: Request) -> Response:
        """List addresses as Prometheus' `http_sd_configs` read them."""
        return _json(self._targets(), 200)

    async def _refuse_metrics(self, _request: Request) -> Response:
        text = "Each process shows its own metrics; /sd lists their addresses.\n"
        return Response(text, 404, media_type="text/plain")


def _json(content: object, status: int) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
