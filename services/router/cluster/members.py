"""Keeps track of the workers and the other routers of a router's cluster."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from itertools import chain
from typing import Any

from redis.asyncio import Redis

from pagewire.services.router.cluster.description import describe_services
from pagewire.services.router.cluster.served_workers import ServedWorkers
from pagewire.services.router.cluster.startup import Startup
from pagewire.services.router.cluster.worker_links import OnLoad, WorkerLinks
from pagewire.shared.cluster.crash_reports import CrashReports
from pagewire.shared.cluster.registry import Registry, WorkerRecord
from pagewire.shared.cluster.routers import RouterDirectory, RouterRecord, RouterState
from pagewire.shared.cluster.worker_directory import WorkerDirectory
from pagewire.shared.control.channel import ClusterKeys
from pagewire.shared.control.protocol import Role
from pagewire.shared.settings.config import RouterSettings


class ClusterMembers:
    """Follows the records in Redis, and keeps a link to each worker.

    Args:
        config_digest: of the config.json of the model that is served.
        redis: shared with others; not closed here.
        on_load: gets the loads that workers report with their tokens.
        on_leave: gets the id of a worker that is gone.
        state: returns this router's state, for its own record.

    Attributes:
        registry: reads the workers' records.
        directory: has the records of the workers that are alive.
        decode_links, prefill_links: connections to them.
        served: which of them get requests.
        routers: announces this router, and has the records of the others.
        startup: knows what the cluster's start still waits for.
    """

    def __init__(
        self,
        settings: RouterSettings,
        config_digest: str,
        redis: Redis,
        on_load: OnLoad,
        on_leave: Callable[[str], None],
        state: Callable[[], RouterState],
    ) -> None:
        secret = settings.cluster_secret.get_secret_value()
        find_crash = CrashReports(redis, secret).find
        keys, name = ClusterKeys.derive(secret), f"router-{secrets.token_hex(4)}"

        def links(role: Role) -> WorkerLinks:
            heartbeat_s, lease_s = settings.heartbeat_s, settings.lease_s
            return WorkerLinks(role, keys, name, heartbeat_s, lease_s, on_load, find_crash)

        self.decode_links, self.prefill_links = links("decode"), links("prefill")
        self._on_worker_leave = on_leave
        # A worker's record is renewed each heartbeat and read each half.
        interval_s = settings.heartbeat_s / 2
        self.registry = Registry(redis, secret, settings.lease_s)
        self.directory = WorkerDirectory(
            self.registry,
            interval_s,
            grace_s=math.inf,  # the control channel shows who is alive where Redis cannot
            on_join=self._on_join,
            on_leave=self._on_leave,
        )
        all_links = self.decode_links, self.prefill_links
        self.served = ServedWorkers(self.directory, *all_links, config_digest)
        self.routers = RouterDirectory(
            redis, secret, settings.router_id, interval_s, settings.lease_s, state
        )
        self.startup = Startup(settings.expected_workers)

    @property
    def expired_records(self) -> int:
        """Records of processes that are lost, which this router was the first to remove."""
        return self.registry.expired_records + self.routers.expired_records

    async def start(self, metrics_endpoint: str) -> None:
        """Look for workers, and announce this router. There may be no worker, and no Redis."""
        await self.directory.start()
        await self.routers.start(metrics_endpoint)

    async def close(self) -> None:
        """End the connections to workers, other routers and Redis. Idempotent."""
        await self.routers.close()
        await self.directory.close()
        await self.prefill_links.close()
        await self.decode_links.close()

    @property
    def num_routers(self) -> int:
        """How many routers take requests, this one included."""
        return 1 + sum(router.state != "draining" for router in self.routers.others())

    def all_routers(self) -> list[RouterRecord]:
        """Return the records of the routers that are alive, this one first."""
        return [self.routers.own(), *self.routers.others()]

    def describe_services(self) -> list[dict[str, Any]]:
        """Return an object for each worker, as `/cluster` shows it."""
        reachable = {link.worker_id for link in chain(self.decode_links, self.prefill_links)}
        served = {record.worker_id for record in (*self.served.decodes(), *self.served.prefills())}
        records = self.directory.workers(), self.directory.others
        return describe_services(*records, reachable, served)

    def _on_join(self, record: WorkerRecord) -> None:
        """Connect to a run of a worker."""
        self.decode_links.join(record)
        self.prefill_links.join(record)

    def _on_leave(self, record: WorkerRecord) -> None:
        """End what is known of a run of a worker."""
        self.decode_links.leave(record)
        self.prefill_links.leave(record)
        self._on_worker_leave(record.worker_id)
