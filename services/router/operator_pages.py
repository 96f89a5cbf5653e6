"""What a router shows operators: its own metrics on one port, its cluster on another."""

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
from pagewire.services.router.dashboard.recent import RecentRequests
from pagewire.services.router.metrics.requests import RouterMetrics
from pagewire.services.router.metrics.targets import describe_targets
from pagewire.services.router.operator_server import OperatorServer
from pagewire.services.router.placement.admission import Admission
from pagewire.shared.base.addresses import advertised_host, with_host
from pagewire.shared.metrics.live import LivePage
from pagewire.shared.metrics.server import MetricsServer
from pagewire.shared.settings.config import RouterSettings


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
        data = ClusterData(describe_cluster, self._live, members.other_routers)
        self._operator_server = OperatorServer(describe_cluster, self._targets, data)
        self.metrics_endpoint = self.operator_endpoint = ""

    async def start(self) -> None:
        """Listen on both ports.

        Raises:
            ConfigError: a port is in use, or there is no address to announce.
        """
        settings = self._settings
        host = await advertised_host(settings.host, settings.advertise_host, settings.redis_url)
        bound = await self._metrics_server.start(settings.host, settings.metrics_port)
        self.metrics_endpoint = with_host(bound, host)
        self.operator_endpoint = with_host(await self._operator_server.start(settings), host)

    async def close(self) -> None:
        """Stop listening, on both at the same time: each takes 0.2 s."""
        await asyncio.gather(self._metrics_server.close(), self._operator_server.close())

    def _live(self) -> LivePage:
        """Return this router's own numbers and its last requests."""
        own = own_numbers(self._members.own_record(), self._metrics, self._admission)
        return LivePage(router=own, requests=self._recent.newest_first())

    async def _show_live(self, _request: Request) -> Response:
        body = msgspec.json.encode(self._live())
        return Response(body, media_type="application/json")

    def _targets(self) -> list[dict[str, Any]]:
        """Return the body of `/sd`: where all routers and workers show their metrics."""
        directory = self._members.directory
        return describe_targets(self._members.all_routers(), directory.workers(), directory.others)
