"""Composes the router: tokenizer, Redis, connections to workers, placement and dispatch."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

import msgspec
from redis.asyncio import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewire.services.router.cluster_view import describe_routers, describe_services
from pagewire.services.router.dashboard.cluster_data import LIVE_PATH, ClusterData
from pagewire.services.router.dashboard.own_numbers import own_numbers
from pagewire.services.router.dashboard.recent import RecentRequests
from pagewire.services.router.dispatch.dispatcher import Dispatcher
from pagewire.services.router.http.bodies.grammar_checker import GrammarChecker
from pagewire.services.router.http.bodies.reader import BodyReader
from pagewire.services.router.http.requests.http_io import BodyMemory
from pagewire.services.router.http.responses.store import ResponseStore
from pagewire.services.router.metrics.by_key import KeyMeter
from pagewire.services.router.metrics.requests import RouterMetrics
from pagewire.services.router.metrics.state import StateCollector, WorkersCollector
from pagewire.services.router.metrics.targets import describe_targets
from pagewire.services.router.operator_server import OperatorServer
from pagewire.services.router.placement.in_flight_load import InFlightLoad
from pagewire.services.router.placement.policy import Policy, PrefixPolicy, RoundRobinPolicy
from pagewire.services.router.placement.worker_selector import WorkerSelector
from pagewire.services.router.startup import Startup
from pagewire.services.router.text.served_model import ServedModel
from pagewire.services.router.workers.worker_links import WorkerLinks
from pagewire.shared.addresses import advertised_host, with_host
from pagewire.shared.aio import end_task, start_task
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.shared.cluster.registry import Registry, WorkerRecord
from pagewire.shared.cluster.routers import RouterDirectory, RouterState
from pagewire.shared.cluster.worker_directory import WorkerDirectory
from pagewire.shared.config import RouterSettings
from pagewire.shared.control.channel import ClusterKeys
from pagewire.shared.control.protocol import PROTOCOL_VERSION, Role
from pagewire.shared.errors import NoWorkerError
from pagewire.shared.http.api_keys import load_keys
from pagewire.shared.http.connections import ConnectionCollector, Connections
from pagewire.shared.index.prefix_index import PrefixIndex
from pagewire.shared.metrics.live import LivePage
from pagewire.shared.metrics.server import MetricsServer
from pagewire.shared.open_files import connection_bound
from pagewire.shared.tracing import Tracing, open_tracing

KEEP_ALIVE_S = 75
_ROLES: tuple[Role, Role] = ("decode", "prefill")


class RouterService:
    """One router. Make it with `connect`; use it as an async context manager, once.

    Attributes:
        is_draining: the router is shutting down and refuses new requests.
        connections: the connections of the HTTP endpoint.
        metrics_endpoint, operator_endpoint: URLs of the metrics port and the operator port.
        api_keys: the keys that requests need; None if they need none.
        tracing: makes the spans of requests; None if they are not traced.
        recent: the last requests that have ended.
    """

    def __init__(
        self, settings: RouterSettings, model: ServedModel, redis: Redis, responses: Redis
    ) -> None:
        self.settings, self.model = settings, model
        self.is_draining = False
        self.api_keys = load_keys(settings)
        self.tracing: Tracing | None = open_tracing(
            settings.otlp_endpoint, "router", settings.router_id, is_server=True
        )
        self._startup = Startup(settings.expected_workers)
        self._redis, self._responses_redis = redis, responses
        secret = settings.cluster_secret.get_secret_value()
        tag = cluster_tag(secret)
        workers = Registry(redis, secret, settings.lease_s)
        self._follow_cluster(workers, redis, secret)
        self.metrics = RouterMetrics(model.name)
        note_lookup = self.metrics.index_lookup.observe
        self._index = PrefixIndex(redis, tag, settings.router_id, note_lookup=note_lookup)
        self.selector = WorkerSelector(
            secret,
            self.directory,
            self._links,
            self._prefill_links,
            self._index,
            _policy(settings),
            self._in_flight,
        )
        self.key_meter = KeyMeter(self.metrics.registry)
        self.recent = RecentRequests(model.name)
        self.dispatcher = Dispatcher(
            self.selector,
            self._links,
            self._in_flight,
            self.metrics,
            settings.max_queue,
            settings.request_timeout_s,
        )
        self.bodies = BodyMemory()
        bound = connection_bound(settings.max_connections)
        self.connections = Connections("the HTTP endpoint", bound, KEEP_ALIVE_S)
        self.body_reader = BodyReader(settings, model)
        self.responses = ResponseStore(responses, tag, settings.responses_bytes)
        self.grammar_checker = GrammarChecker(model)
        self._stack = AsyncExitStack()
        self._make_pages(workers)

    def _follow_cluster(self, workers: Registry, redis: Redis, secret: str) -> None:
        """Make the directories of workers and routers, and the links to workers."""
        settings = self.settings
        # A worker's record is renewed once per heartbeat and read twice.
        self._in_flight = InFlightLoad(settle_s=2 * settings.heartbeat_s)
        self._links, self._prefill_links = (
            WorkerLinks(
                role,
                ClusterKeys.derive(secret),
                f"router-{secrets.token_hex(4)}",
                settings.heartbeat_s,
                settings.lease_s,
                self._in_flight.note_report,
            )
            for role in _ROLES
        )
        self.directory = WorkerDirectory(
            workers,
            settings.heartbeat_s / 2,
            grace_s=math.inf,  # while Redis is down, the control channel shows who is alive
            on_join=self._on_join,
            on_leave=self._on_leave,
        )
        self.routers = RouterDirectory(
            redis,
            secret,
            settings.router_id,
            settings.heartbeat_s / 2,
            settings.lease_s,
            lambda: self._state,
        )

    @classmethod
    async def connect(cls, settings: RouterSettings) -> RouterService:
        """Read the model's tokenizer, connect to Redis, open the metrics and operator ports.

        Raises:
            ModelLoadError: the model cannot be found or read.
            RedisSetupError: Redis refuses or does not answer.
            ConfigError: the metrics or operator port is in use, or there is no address to announce.
        """
        model = await asyncio.to_thread(ServedModel.load, settings)
        async with AsyncExitStack() as stack:
            redis = responses = await connect_redis(settings.redis_url)
            stack.push_async_callback(redis.aclose)
            if (url := settings.responses_redis_url) is not None:
                responses = await connect_redis(url, setting="PAGEWIRE_RESPONSES_REDIS_URL")
                stack.push_async_callback(responses.aclose)
            service = cls(settings, model, redis, responses)
            await service._serve_metrics()
            stack.pop_all()
        return service

    async def __aenter__(self) -> RouterService:
        """Begin to look for workers; there may be none yet."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._redis.aclose)
            if self.tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            stack.push_async_callback(self._responses_redis.aclose)
            stack.callback(self.body_reader.close)
            stack.callback(self.grammar_checker.close)
            stack.push_async_callback(self._index.close)
            stack.push_async_callback(self._links.close)
            stack.push_async_callback(self._prefill_links.close)
            stack.push_async_callback(self.directory.close)
            stack.push_async_callback(self._close_pages)
            await self.directory.start()
            if self.api_keys is not None:
                watch = start_task(self.api_keys.watch(), "api-keys")
                stack.push_async_callback(end_task, watch)
            stack.push_async_callback(self.routers.close)
            await self.routers.start(self.metrics_endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End all connections."""
        await self._stack.aclose()

    def _on_join(self, record: WorkerRecord) -> None:
        """Connect to a run of a worker."""
        self._links.join(record)
        self._prefill_links.join(record)

    def _on_leave(self, record: WorkerRecord) -> None:
        """Disconnect from a run of a worker and forget its load."""
        self._links.leave(record)
        self._prefill_links.leave(record)
        self._in_flight.forget(record.worker_id)

    def _make_pages(self, workers: Registry) -> None:
        """Make the servers of the metrics port and the operator port, and what they show."""
        registry, name = self.metrics.registry, self.model.name
        admission = self.dispatcher.admission
        registry.register(StateCollector(name, admission, self.directory, workers, self._index))
        registry.register(WorkersCollector(name, self.directory, self._services))
        registry.register(ConnectionCollector("pagewire_router", self.connections))
        self._metrics_server = MetricsServer(
            registry,
            lambda: self.can_serve,
            "pagewire_router_metrics",
            self.settings.restarts,
            [Route(LIVE_PATH, self._show_live)],
        )
        data = ClusterData(self.cluster, self.live, self.routers.others)
        self._operator_server = OperatorServer(self.cluster, self.targets, data)
        self.metrics_endpoint = self.operator_endpoint = ""

    async def _close_pages(self) -> None:
        """Close both servers at the same time, because each takes 0.2 s."""
        await asyncio.gather(self._metrics_server.close(), self._operator_server.close())

    async def _serve_metrics(self) -> None:
        """Open the metrics port and the operator port.

        Raises:
            ConfigError: a port is in use, or there is no address to announce.
        """
        settings = self.settings
        host = await advertised_host(settings.host, settings.advertise_host, settings.redis_url)
        bound = await self._metrics_server.start(settings.host, settings.metrics_port)
        self.metrics_endpoint = with_host(bound, host)
        self.operator_endpoint = with_host(await self._operator_server.start(settings), host)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.selector.max_model_len(self.model.max_model_len)

    @property
    def can_serve(self) -> bool:
        """Whether a request would find a decode worker."""
        return not self.is_draining and bool(self.selector.decode_records())

    def check_room(self) -> None:
        """Check that there is room for a request, before its body is read.

        Raises:
            NoWorkerError: the router shuts down.
            OverloadedError: the queue is full.
        """
        self._check_serving()
        self.dispatcher.admission.check_room()

    def admit(self) -> AbstractContextManager[None]:
        """Check again when a request's body has arrived, and count the request while it is read.

        Raises:
            NoWorkerError: the router shuts down.
            OverloadedError: the queue is full (raised on entering the context).
        """
        self._check_serving()
        return self.dispatcher.admission.reading()

    def _check_serving(self) -> None:
        if self.is_draining:
            raise NoWorkerError("the router shuts down")

    @property
    def _state(self) -> RouterState:
        """The state in this router's record; reading it may end the start, as `/ready` does."""
        if self.is_draining:
            return "draining"
        return "starting" if self._startup.waiting_for(self._services()) else "ready"

    def _services(self) -> list[dict[str, Any]]:
        reachable = {link.worker_id for link in self._links}
        return describe_services(self.directory.workers(), self.directory.others, reachable)

    def health(self) -> dict[str, Any]:
        """Return the body of `/health`: what clients may know about the cluster."""
        cluster = self.cluster()
        return {name: cluster[name] for name in ("status", "model")}

    def cluster(self) -> dict[str, Any]:
        """Return the body of `/cluster`; the cluster is ready if its status is "ok"."""
        services = self._services()
        waiting_for = self._startup.waiting_for(services)
        status = "starting" if waiting_for else "ok" if self.can_serve else "no decode worker"
        return {
            "status": "draining" if self.is_draining else status,
            "model": self.model.name,
            "redis": "up" if self.directory.redis_ok else "down",
            "protocol": PROTOCOL_VERSION,
            "waiting_for": waiting_for,
            "routers": describe_routers([self.routers.own(), *self.routers.others()]),
            "services": services,
        }

    def live(self) -> LivePage:
        """Return this router's own numbers and its last requests."""
        own = own_numbers(self.routers.own(), self.metrics, self.dispatcher.admission)
        return LivePage(router=own, requests=self.recent.newest_first())

    async def _show_live(self, _request: Request) -> Response:
        body = msgspec.json.encode(self.live())
        return Response(body, media_type="application/json")

    def targets(self) -> list[dict[str, Any]]:
        """Return the body of `/sd`: where all routers and workers show their metrics."""
        routers = [self.routers.own(), *self.routers.others()]
        return describe_targets(routers, self.directory.workers(), self.directory.others)


def _policy(settings: RouterSettings) -> Policy:
    if settings.policy == "round_robin":
        return RoundRobinPolicy()
    return PrefixPolicy(random.Random())
