"""Composes the router: tokenizer, Redis, connections to workers, placement and dispatch."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

import httpx
from redis.asyncio import Redis

from pagewire.services.router.dispatch.dispatcher import Dispatcher
from pagewire.services.router.http.body_reader import BodyReader
from pagewire.services.router.http.grammar_checker import GrammarChecker
from pagewire.services.router.http.health import describe_routers, describe_services
from pagewire.services.router.http.http_io import BodyMemory
from pagewire.services.router.metrics.pages import render
from pagewire.services.router.metrics.requests import RouterMetrics
from pagewire.services.router.metrics.routers import RouterScraper, merge_routers
from pagewire.services.router.metrics.state import StateCollector
from pagewire.services.router.metrics.workers import WorkerScraper
from pagewire.services.router.placement.in_flight_load import InFlightLoad
from pagewire.services.router.placement.policy import Policy, PrefixPolicy, RoundRobinPolicy
from pagewire.services.router.placement.worker_selector import WorkerSelector
from pagewire.services.router.startup import Startup
from pagewire.services.router.text.served_model import ServedModel
from pagewire.services.router.workers.decode_links import DecodeLinks
from pagewire.shared.addresses import advertised_host, with_host
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.shared.cluster.registry import Registry, WorkerDirectory
from pagewire.shared.cluster.routers import RouterDirectory, RouterState
from pagewire.shared.config import RouterSettings
from pagewire.shared.control.channel import ClusterKeys
from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.shared.errors import NoWorkerError
from pagewire.shared.http.connections import ConnectionCollector, Connections
from pagewire.shared.index.prefix_index import PrefixIndex
from pagewire.shared.metrics.server import MetricsServer
from pagewire.shared.open_files import connection_bound

KEEP_ALIVE_S = 75


class RouterService:
    """One router. Make it with `connect`; use it as an async context manager, once.

    Attributes:
        is_draining: shutting down: nothing new is taken.
        connections: of the HTTP endpoint.
    """

    def __init__(self, settings: RouterSettings, model: ServedModel, redis: Redis) -> None:
        self.settings, self.model = settings, model
        self.is_draining = False
        self._startup = Startup(settings.expected_workers)
        self._redis = redis
        secret = settings.cluster_secret.get_secret_value()
        tag = cluster_tag(secret)
        self._links = DecodeLinks(
            ClusterKeys.derive(secret),
            f"router-{secrets.token_hex(4)}",
            settings.heartbeat_s,
            settings.lease_s,
        )
        workers = Registry(redis, secret, settings.lease_s)
        self.directory = WorkerDirectory(
            workers,
            settings.heartbeat_s / 2,
            grace_s=math.inf,  # the control channel shows who is alive where Redis cannot
            on_join=self._links.join,
            on_leave=self._links.leave,
        )
        self.routers = RouterDirectory(
            redis,
            secret,
            settings.router_id,
            settings.heartbeat_s / 2,
            settings.lease_s,
            lambda: self._state,
        )
        self._index = PrefixIndex(redis, tag, settings.router_id)
        # A worker's record is renewed each heartbeat and read each half.
        in_flight = InFlightLoad(settle_s=2 * settings.heartbeat_s)
        self.selector = WorkerSelector(
            secret, self.directory, self._links, self._index, _policy(settings), in_flight
        )
        self.metrics = RouterMetrics(model.name)
        self.dispatcher = Dispatcher(
            self.selector,
            self._links,
            in_flight,
            self.metrics,
            settings.max_queue,
            settings.request_timeout_s,
        )
        self.bodies = BodyMemory()
        bound = connection_bound(settings.max_connections)
        self.connections = Connections("the HTTP endpoint", bound, KEEP_ALIVE_S)
        self.body_reader = BodyReader(settings, model)
        self.grammar_checker = GrammarChecker(model)
        self._stack = AsyncExitStack()
        self._make_pages(workers)

    @classmethod
    async def connect(cls, settings: RouterSettings) -> RouterService:
        """Read the model's tokenizer, reach Redis, and listen for those who want the metrics.

        Raises:
            ModelLoadError: the model cannot be found or read.
            RedisSetupError: Redis refuses or does not answer.
            ConfigError: the metrics port is in use, or there is no address to announce.
        """
        model = await asyncio.to_thread(ServedModel.load, settings)
        redis = await connect_redis(settings.redis_url)
        try:
            service = cls(settings, model, redis)
            await service._serve_metrics()
        except BaseException:
            await redis.aclose()
            raise
        return service

    async def __aenter__(self) -> RouterService:
        """Begin to look for workers. There may be none."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._redis.aclose)
            stack.push_async_callback(self._http.aclose)
            stack.callback(self.body_reader.close)
            stack.callback(self.grammar_checker.close)
            stack.push_async_callback(self._index.close)
            stack.push_async_callback(self._links.close)
            stack.push_async_callback(self.directory.close)
            stack.push_async_callback(self._metrics_server.close)
            await self.directory.start()
            stack.push_async_callback(self.routers.close)
            await self.routers.start(self._metrics_endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """End all connections."""
        await self._stack.aclose()

    def _make_pages(self, workers: Registry) -> None:
        """Make what `/metrics` shows, and its server."""
        registry, name = self.metrics.registry, self.model.name
        admission = self.dispatcher.admission
        registry.register(StateCollector(name, admission, self.directory, workers, self._index))
        registry.register(ConnectionCollector("pagewire_router", self.connections))
        self._http = httpx.AsyncClient(trust_env=False)
        self._worker_scraper = WorkerScraper(name, self._http, registry)
        self._router_scraper = RouterScraper(self._http, registry)
        self._metrics_server = MetricsServer(
            registry, lambda: self.can_serve, "pagewire_router_metrics"
        )
        self._metrics_endpoint = ""

    async def _serve_metrics(self) -> None:
        """Show this router's own metrics on a port of its own.

        Raises:
            ConfigError: the port is in use, or there is no address to announce.
        """
        settings = self.settings
        host = await advertised_host(settings.host, settings.advertise_host, settings.redis_url)
        bound = await self._metrics_server.start(settings.host, settings.metrics_port)
        self._metrics_endpoint = with_host(bound, host)

    @property
    def max_model_len(self) -> int:
        """Prompt and answer together, in tokens."""
        return self.selector.max_model_len(self.model.max_model_len)

    @property
    def can_serve(self) -> bool:
        """Whether a request would find a decode worker."""
        return not self.is_draining and bool(self.selector.decode_records())

    def check_room(self) -> None:
        """Check, before a request costs anything, that there is room for it.

        Raises:
            NoWorkerError: the router shuts down.
            OverloadedError: the queue is full.
        """
        self._check_serving()
        self.dispatcher.admission.check_room()

    def admit(self) -> AbstractContextManager[None]:
        """Check again when its body is here, and count it while it is read.

        Raises:
            NoWorkerError: the router shuts down.
            OverloadedError: the queue is full; on entering.
        """
        self._check_serving()
        return self.dispatcher.admission.reading()

    def _check_serving(self) -> None:
        if self.is_draining:
            raise NoWorkerError("the router shuts down")

    @property
    def _state(self) -> RouterState:
        """What the others are to know. The start ends even if nobody asks for `/health`."""
        if self.is_draining:
            return "draining"
        return "starting" if self._startup.waiting_for(self._services()) else "ready"

    def _services(self) -> list[dict[str, Any]]:
        reachable = {link.worker_id for link in self._links}
        return describe_services(self.directory.workers(), self.directory.others, reachable)

    def health(self) -> dict[str, Any]:
        """Return the body of `/health`; the cluster is ready where its status is "ok"."""
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

    async def metrics_text(self) -> bytes:
        """Return the body of `/metrics`: of all routers and workers."""
        relayed, others = await asyncio.gather(
            self._worker_scraper.scrape(self.directory.workers()),
            self._router_scraper.scrape(self.routers.others()),
        )
        own = (self.settings.router_id, self.metrics.registry.collect())
        return render(merge_routers(own, others), relayed)


def _policy(settings: RouterSettings) -> Policy:
    if settings.policy == "round_robin":
        return RoundRobinPolicy()
    return PrefixPolicy(random.Random())
