"""Keeps one process's view of the cluster's workers up to date by polling the registry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import RedisUnavailableError
from pagewire.shared.cluster.registry import Registry
from pagewire.shared.cluster.worker_record import OtherVersion, WorkerRecord
from pagewire.shared.control.protocol import Role

logger = logging.getLogger(__name__)


class WorkerDirectory:
    """Knows the workers without asking Redis at each request.

    A worker that is missing from an answer stays for one more lease, so that a flushed or restarted
    Redis costs nothing: records are back with the next heartbeat. While Redis does not answer, the
    last view stays for a grace time. The control channel detects deaths sooner.

    Args:
        poll_s: how often the registry is read.
        grace_s: how long the last view is kept while Redis does not answer.
        explain_after_s: if there is no worker for this long after the start, the log explains why
            that may be.
        own_id: the worker whose directory this is; None for a router's.
        on_join: called with the record of a new worker.
        on_leave: called with the last record of a worker that is gone. A restarted worker, which
            has a new epoch, leaves and joins.

    Attributes:
        redis_ok: whether the last read succeeded.
        others: live workers of another release, as of the last read that succeeded. They can't be
            used, and are not in `workers`.
    """

    def __init__(
        self,
        registry: Registry,
        poll_s: float,
        *,
        grace_s: float = 30.0,
        explain_after_s: float = 10.0,
        own_id: str | None = None,
        on_join: Callable[[WorkerRecord], None] | None = None,
        on_leave: Callable[[WorkerRecord], None] | None = None,
    ) -> None:
        self.redis_ok = self._is_silent = False
        self.others: tuple[OtherVersion, ...] = ()
        self._registry, self._poll_s, self._grace_s = registry, poll_s, grace_s
        self._explain_after_s, self._own_id = explain_after_s, own_id
        self._on_join, self._on_leave = on_join, on_leave
        self._records: dict[str, WorkerRecord] = {}
        self._missing_since: dict[str, float] = {}
        self._started = self._last_success = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._is_explained = False

    def workers(self, role: Role | None = None) -> tuple[WorkerRecord, ...]:
        """Return the records of the workers known to be alive, draining ones included."""
        return tuple(c for c in self._records.values() if role is None or c.role == role)

    def get(self, worker_id: str) -> WorkerRecord | None:
        """Return a worker's record, or None if there is none."""
        return self._records.get(worker_id)

    async def start(self) -> None:
        """Read the registry once, then go on in the background."""
        await self.refresh()
        self._task = start_task(self._run(), "worker-directory")

    async def close(self) -> None:
        """Stop reading; the view stays as it is. Idempotent."""
        task, self._task = self._task, None
        await end_task(task)

    async def refresh(self) -> None:
        """Read all records from the registry now; keep the old ones if Redis fails."""
        try:
            records = await self._registry.list_workers()
        except RedisUnavailableError as exc:
            self._on_failure(exc)
            return
        if self._is_silent:
            logger.info("Redis answers again, workers in the registry: %d", len(records))
        self.redis_ok, self._is_silent = True, False
        self._last_success = time.monotonic()
        current = [record for record in records if not self._is_outdated(record)]
        self.others = tuple(entry for entry in current if isinstance(entry, OtherVersion))
        for other in self.others:
            if other.worker_id in self._records:
                self._drop(other.worker_id)
        self._merge(
            {entry.worker_id: entry for entry in current if isinstance(entry, WorkerRecord)}
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.refresh()
            if not (self._is_explained or self.others) and self.redis_ok:
                await self._explain_emptiness()

    async def _explain_emptiness(self) -> None:
        """Warn once if Redis has workers with another secret, which may be the right one."""
        if time.monotonic() - self._started < self._explain_after_s:
            return
        self._is_explained = True
        try:
            if await self._registry.has_other_clusters():
                logger.warning(
                    "there is no%s worker with this cluster secret, but some with another one in "
                    "this Redis; all services of a cluster need the same PAGEWIRE_CLUSTER_SECRET",
                    "" if self._own_id is None else " other",
                )
        except RedisUnavailableError as exc:
            logger.warning("cannot look for workers of another cluster: %s", exc)

    def _on_failure(self, exc: RedisUnavailableError) -> None:
        if not self._is_silent:
            logger.warning("Redis does not answer, keeping the worker records read before: %s", exc)
        self.redis_ok, self._is_silent = False, True
        if time.monotonic() - self._last_success > self._grace_s:
            self.others = ()
            for worker_id in list(self._records):
                self._drop(worker_id)

    def _is_outdated(self, record: WorkerRecord | OtherVersion) -> bool:
        """Whether an earlier run of a worker, which has not ended yet, wrote the record."""
        known = self._records.get(record.worker_id)
        return known is not None and record.epoch is not None and record.epoch < known.epoch

    def _merge(self, fresh: dict[str, WorkerRecord]) -> None:
        now = time.monotonic()
        for worker_id, record in fresh.items():
            known = self._records.get(worker_id)
            self._missing_since.pop(worker_id, None)
            if known is not None and record.epoch > known.epoch:
                self._drop(worker_id)
                known = None
            self._records[worker_id] = record
            self._is_explained |= worker_id != self._own_id
            if known is None:
                self._notify(self._on_join, record)
        for worker_id in self._records.keys() - fresh.keys():
            if now - self._missing_since.setdefault(worker_id, now) >= self._registry.lease_s:
                self._drop(worker_id)

    def _drop(self, worker_id: str) -> None:
        self._missing_since.pop(worker_id, None)
        self._notify(self._on_leave, self._records.pop(worker_id))

    def _notify(
        self, callback: Callable[[WorkerRecord], None] | None, record: WorkerRecord
    ) -> None:
        if callback is None:
            return
        try:
            callback(record)
        except Exception:
            # A bug in one listener must not end the view that placement needs.
            logger.exception("a listener of the worker directory failed for %s", record.worker_id)
