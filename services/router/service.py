"""Composes the router: the cluster's members, placement, dispatch, HTTP, pages for operators."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from typing import Any

from redis.asyncio import Redis

from pagewire.services.router.cluster.description import describe_routers
from pagewire.services.router.cluster.members import ClusterMembers
from pagewire.services.router.dashboard.recent_requests import RecentRequests
from pagewire.services.router.dispatch.dispatcher import Dispatcher
from pagewire.services.router.http.api.responses.store import ResponseStore
from pagewire.services.router.http.body_processes.grammar_checker import GrammarChecker
from pagewire.services.router.http.body_processes.reader import BodyReader
from pagewire.services.router.http.connection.http_io import BodyMemory
from pagewire.services.router.metrics.by_key import KeyMeter
from pagewire.services.router.metrics.requests import RouterMetrics
from pagewire.services.router.metrics.state import StateCollector
from pagewire.services.router.operator_pages import OperatorPages
from pagewire.services.router.placement.admission import Admission
from pagewire.services.router.placement.in_flight_load import InFlightLoad
from pagewire.services.router.placement.policies import POLICIES
from pagewire.services.router.placement.worker_selector import WorkerSelector
from pagewire.services.router.text.served_model import ServedModel
from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import NoWorkerError
from pagewire.shared.base.open_files import connection_bound
from pagewire.shared.base.shares import divided
from pagewire.shared.base.tracing import Tracing, open_tracing
from pagewire.shared.cluster.redis_client import cluster_tag, connect_redis
from pagewire.shared.cluster.routers import RouterState
from pagewire.shared.control.protocol import PROTOCOL_VERSION
from pagewire.shared.http.api_keys import load_keys
from pagewire.shared.http.connections import ConnectionCollector, Connections
from pagewire.shared.index.prefix_index import PrefixIndex
from pagewire.shared.settings.config import RouterSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75


class RouterService:
    """A router. Make it with `connect`; use it as an async context manager, once.

    Attributes:
        is_draining: the router is shutting down and refuses new requests.
        connections: the connections of the HTTP endpoint.
        pages: the metrics port and the operator port.
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
        self._report_unknown_names()
        self.tracing: Tracing | None = open_tracing(
            settings.otlp_endpoint, "router", settings.router_id, is_server=True
        )
        self._stack = AsyncExitStack()
        bound = connection_bound(settings.max_connections)
        self.connections = Connections("the HTTP endpoint", bound, KEEP_ALIVE_S)
        self._compose_placement(redis)
        self._compose_http(responses)
        self._compose_pages()

    def _report_unknown_names(self) -> None:
        """Report objectives of API keys that do not exist; the file of keys may still get them."""
        known = set() if self.api_keys is None else self.api_keys.names
        for name in sorted((self.settings.slo_gap_s_of_keys or {}).keys() - known):
            logger.warning("slo_gap_s_of_keys has no effect for %s: no API key has this name", name)

    def _compose_placement(self, redis: Redis) -> None:
        """Make what chooses workers for a request, and carries it there."""
        settings = self.settings
        secret = settings.cluster_secret.get_secret_value()
        # A record is renewed once per heartbeat and read twice.
        in_flight = InFlightLoad(settle_s=2 * settings.heartbeat_s)
        self.members = ClusterMembers(
            settings,
            self.model.config_digest,
            redis,
            in_flight.record_report,
            in_flight.forget,
            lambda: self._state,
        )
        self.metrics = RouterMetrics(self.model.name)
        self._index = PrefixIndex(
            redis,
            cluster_tag(secret),
            settings.router_id,
            note_lookup=self.metrics.index_lookup.observe,
        )
        self.selector = WorkerSelector(
            secret, self.members, self._index, POLICIES[settings.policy](random.Random()), in_flight
        )
        self.dispatcher = Dispatcher(
            self.selector,
            self.members.decode_links,
            in_flight,
            self.metrics,
            Admission(
                settings.max_queue,
                partial(self._share, settings.max_queue_per_key),
                self.connections.limit,
            ),
            settings.request_timeout_s,
        )

    def _compose_http(self, responses: Redis) -> None:
        """Make what the endpoint's routes use."""
        settings = self.settings
        self.bodies = BodyMemory()
        self.body_reader = BodyReader(
            settings, self.model, partial(self._share, settings.max_body_processes_per_key)
        )
        self.grammar_checker = GrammarChecker(self.model)
        secret = settings.cluster_secret.get_secret_value()
        bounds = settings.responses_bytes, settings.responses_bytes_per_key
        self.responses = ResponseStore(responses, secret, *bounds)

    def _compose_pages(self) -> None:
        """Make what operators and Prometheus see."""
        registry, name, members = self.metrics.registry, self.model.name, self.members
        admission = self.dispatcher.admission
        self.key_meter = KeyMeter(registry)
        self.recent = RecentRequests(name)
        registry.register(StateCollector(name, admission, members, self._index))
        registry.register(ConnectionCollector("pagewire_router", self.connections))
        self.pages = OperatorPages(
            self.settings,
            members,
            self.metrics,
            admission,
            self.recent,
            self.describe_cluster,
            lambda: self.can_serve,
        )

    @classmethod
    async def connect(cls, settings: RouterSettings) -> RouterService:
        """Read the model's tokenizer, connect to Redis, open the metrics and operator ports.

        Raises:
            ModelLoadError: the model cannot be found or read.
            RedisSetupError: Redis refuses or does not answer.
            ConfigError: the metrics or operator port is in use, or there is no address to announce.
        """
        settings.warn_without_secret()
        model = await asyncio.to_thread(ServedModel.load, settings)
        async with AsyncExitStack() as stack:
            redis = responses = await connect_redis(settings.redis_url)
            stack.push_async_callback(redis.aclose)
            if (url := settings.responses_redis_url) is not None:
                responses = await connect_redis(url, setting="PAGEWIRE_RESPONSES_REDIS_URL")
                stack.push_async_callback(responses.aclose)
            service = cls(settings, model, redis, responses)
            await service.pages.start()
            service._stack = stack.pop_all()
        return service

    async def __aenter__(self) -> RouterService:
        """Begin to look for workers; there may be none yet."""
        async with self._stack as stack:
            if self.tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            stack.callback(self.body_reader.close)
            stack.callback(self.grammar_checker.close)
            stack.push_async_callback(self._index.close)
            stack.push_async_callback(self.pages.close)
            if self.api_keys is not None:
                watch = start_task(self.api_keys.watch(), "api-keys")
                stack.push_async_callback(end_task, watch)
            stack.push_async_callback(self.members.close)
            await self.members.start(self.pages.metrics_endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.selector.max_model_len(self.model.max_model_len)

    def tenant_of(self, key: str | None) -> str | None:
        """Return whose cached blocks a request shares; None: cached blocks are everybody's.

        Args:
            key: name of the request's API key; None if it has none.
        """
        # Also while all keys have one name: workers still have what keys of another one have sent.
        return None if self.settings.share_prefix_cache else key

    @property
    def can_serve(self) -> bool:
        """Whether a request would find a decode worker."""
        return not self.is_draining and bool(self.selector.decode_records())

    def check_room(self, owner: str) -> None:
        """Check that there is room for a request of an owner, before its body is read.

        Raises:
            NoWorkerError: the router shuts down.
            OverloadedError: the queue or all connections are full, or the owner holds as much of
                them as it may.
        """
        self._check_serving()
        self.dispatcher.admission.check_connections(owner)
        self.dispatcher.admission.check_room(owner)

    def admit(self, owner: str) -> AbstractContextManager[None]:
        """Check again when a request's body has arrived, and count the request while it is read.

        Raises:
            NoWorkerError: the router shuts down.
            OverloadedError: as for `check_room` (raised on entering the context).
        """
        self._check_serving()
        return self.dispatcher.admission.reading(owner)

    def _share(self, bound: int | None) -> int:
        """Return this router's part of a key's bound: each of those that are alive has one."""
        return sys.maxsize if bound is None else divided(bound, self.members.num_routers)

    def _check_serving(self) -> None:
        if self.is_draining:
            raise NoWorkerError("the router shuts down")

    @property
    def _state(self) -> RouterState:
        """The router's state for other routers. The start ends even if nobody asks for `/ready`."""
        if self.is_draining:
            return "draining"
        services = self.members.describe_services()
        return "starting" if self.members.startup.waiting_for(services) else "ready"

    def describe_cluster(self) -> dict[str, Any]:
        """Return the body of `/cluster`; the cluster is ready where its status is "ok"."""
        services = self.members.describe_services()
        waiting_for = self.members.startup.waiting_for(services)
        status = "starting" if waiting_for else "ok" if self.can_serve else "no decode worker"
        return {
            "status": "draining" if self.is_draining else status,
            "model": self.model.name,
            "redis": "up" if self.members.directory.redis_ok else "down",
            "protocol": PROTOCOL_VERSION,
            "waiting_for": waiting_for,
            "routers": describe_routers(self.members.all_routers()),
            "services": services,
        }
