"""Serves pages for operators: a router's metrics on one port, its cluster on another.

The operator port shows the cluster to people, to `pagewire` and to Prometheus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewire.services.router.cluster.members import ClusterMembers
from pagewire.services.router.dashboard.cluster_data import LIVE_PATH, ClusterData
from pagewire.services.router.dashboard.own_numbers import own_numbers
from pagewire.services.router.dashboard.pages import dashboard_routes
from pagewire.services.router.dashboard.recent_requests import RecentRequests
from pagewire.services.router.metrics.requests import RouterMetrics
from pagewire.services.router.metrics.targets import describe_targets
from pagewire.services.router.placement.admission import Admission
from pagewire.shared.base.addresses import advertised_host, with_host
from pagewire.shared.base.listener import inherited_socket
from pagewire.shared.http.side_server import SideServer, listening_socket
from pagewire.shared.metrics.live import LivePage
from pagewire.shared.metrics.server import MetricsServer
from pagewire.shared.settings.config import RouterSettings

OPERATOR_FD = "--operator-fd"
OPERATOR_PORT = "--operator-port"


class OperatorPages:
    """The servers of both ports.

    Args:
        metrics: of this router; its registry is served as it is.
        admission: knows the requests in progress.
        recent: requests that have ended.
        describe_cluster: returns the body of `/cluster`.
        can_serve: whether a request would find a decode worker.

    Attributes:
        metrics_endpoint, operator_endpoint: URLs of the ports, once started.
    """

    def __init__(
        self,
        settings: RouterSettings,
        members: ClusterMembers,
        metrics: RouterMetrics,
        admission: Admission,
        recent: RecentRequests,
        describe_cluster: Callable[[], dict[str, Any]],
        can_serve: Callable[[], bool],
    ) -> None:
        self._settings, self._members = settings, members
        self._metrics, self._admission, self._recent = metrics, admission, recent
        self._metrics_server = MetricsServer(
            metrics.registry,
            can_serve,
            "pagewire_router_metrics",
            settings.restarts,
            [Route(LIVE_PATH, self._show_live)],
        )
        self._describe_cluster = describe_cluster
        data = ClusterData(describe_cluster, self._live, members.routers.others)
        routes = [
            Route("/cluster", self._show_cluster),
            Route("/sd", self._show_targets),
            Route("/metrics", self._refuse_metrics),
            *dashboard_routes(data.body),
        ]
        self._operator_server = SideServer("the operator port", routes)
        self.metrics_endpoint = self.operator_endpoint = ""

    async def start(self) -> None:
        """Listen on both ports.

        Raises:
            ConfigError: a port is in use, the file descriptor is not such a socket's, or there is
                no address to announce.
        """
        settings = self._settings
        host = await advertised_host(settings.host, settings.advertise_host, settings.redis_url)
        names = settings.own_names
        bound = await self._metrics_server.start(settings.host, settings.metrics_port, names)
        self.metrics_endpoint = with_host(bound, host)
        if settings.operator_fd is not None:
            listener = inherited_socket(settings.operator_fd, OPERATOR_FD)
        else:
            port = settings.chosen_operator_port
            listener = await listening_socket(settings.host, port, OPERATOR_PORT, "operators")
        self._operator_server.start(listener, names)
        self.operator_endpoint = with_host(f"http://:{listener.getsockname()[1]}", host)

    async def close(self) -> None:
        """Stop listening, on both at the same time: each takes 0.2 s."""
        await asyncio.gather(self._metrics_server.close(), self._operator_server.close())

    def _live(self) -> LivePage:
        """Return this router's own numbers and its last requests."""
        own = own_numbers(self._members.routers.own(), self._metrics, self._admission)
        return LivePage(router=own, requests=self._recent.newest_first())

    async def _show_live(self, _request: Request) -> Response:
        return _json(self._live())

    async def _show_cluster(self, _request: Request) -> Response:
        """Describe the cluster; 200 if it is ready."""
        body = self._describe_cluster()
        return _json(body, 200 if body["status"] == "ok" else 503)

    async def _show_targets(self, _request: Request) -> Response:
        """List where all routers and workers show metrics, as `http_sd_configs` read it."""
        directory = self._members.directory
        routers = self._members.all_routers()
        return _json(describe_targets(routers, directory.workers(), directory.others))

    async def _refuse_metrics(self, _request: Request) -> Response:
        text = "Each process shows its own metrics; /sd lists their addresses.\n"
        return Response(text, 404, media_type="text/plain")


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
