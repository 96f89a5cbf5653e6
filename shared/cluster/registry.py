"""Publishes and lists the workers of a cluster: records with a lease, in Redis.

    pagewire:<tag>:workers        set of worker ids
    pagewire:<tag>:worker:<id>    the record, msgpack with a seal, expires after the lease

A record that is not renewed expires. Each reader removes ids without a record. Readers ignore a
record without the cluster's seal (`record_seal.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import ProtocolError, RedisUnavailableError, SealError
from pagewire.shared.cluster.record_seal import RecordSeal
from pagewire.shared.cluster.redis_client import cluster_tag, redis_call
from pagewire.shared.cluster.worker_record import (
    MAX_RECORD_BYTES,
    LinkInfo,
    OtherVersion,
    WorkerLoad,
    WorkerRecord,
    decode_head,
    decode_record,
)
from pagewire.shared.control.protocol import MAX_EPOCH, PROTOCOL_VERSION

__all__ = [
    "RecordPublisher",
    "LinkInfo",
    "OtherVersion",
    "Registry",
    "WorkerRecord",
    "WorkerLoad",
]

logger = logging.getLogger(__name__)

_MAX_LOGGED_IDS = 256
_MAX_SCANS, _SCANNED = 16, 1000  # of keys of all kinds


class Registry:
    """Reads and writes worker records.

    Args:
        redis: shared with others; not closed here.
        cluster_secret: separates the cluster's keys from those of others, and seals the records.
        lease_s: how long a record is valid unless renewed.
        timeout_s: for each call.

    Attributes:
        unsealed_records: reads of a record that no member of the cluster wrote.
        malformed_records: reads of an entry that is not a worker record.
        other_version_records: reads of a record whose worker speaks another protocol version.
        expired_records: records that their workers neither renewed nor withdrew; each is counted
            by the one reader that removes its id.
    """

    def __init__(
        self, redis: Redis, cluster_secret: str, lease_s: float, timeout_s: float = 1.0
    ) -> None:
        self.lease_s = lease_s
        self.unsealed_records = 0
        self.malformed_records = 0
        self.other_version_records = 0
        self.expired_records = 0
        self._redis, self._timeout_s = redis, timeout_s
        self._seal = RecordSeal(cluster_secret)
        tag = cluster_tag(cluster_secret)
        self._ids_key = f"pagewire:{tag}:workers"
        self._record_prefix = f"pagewire:{tag}:worker:"
        self._encoder = msgspec.msgpack.Encoder()
        self._logged: set[tuple[str, int | str]] = set()

    async def publish(self, record: WorkerRecord) -> None:
        """Write or renew a record.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        await redis_call(self._publish(record), self._timeout_s)

    async def withdraw(self, worker_id: str) -> None:
        """Remove a record at once.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        await redis_call(self._withdraw(worker_id), self._timeout_s)

    async def list_workers(self) -> list[WorkerRecord | OtherVersion]:
        """Return the records of all workers that are alive, in no particular order.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        return await redis_call(self._list_workers(), self._timeout_s)

    async def has_other_clusters(self) -> bool:
        """Whether Redis has workers of another cluster secret, as far as a bounded search finds.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        return await redis_call(self._has_other_clusters(), self._timeout_s)

    async def new_epoch(self, worker_id: str) -> int:
        """Return an epoch greater than those of all earlier runs of a worker.

        It comes from the clock, or from an earlier record if the clock was set back.
        """
        now = time.time_ns()
        try:
            raw: Any = await redis_call(
                self._redis.get(self._record_prefix + worker_id), self._timeout_s
            )
        except RedisUnavailableError as exc:
            logger.warning("cannot read the earlier record of %s: %s", worker_id, exc)
            return now
        earlier = None if raw is None else self._epoch_in(worker_id, raw)
        return now if earlier is None or earlier == MAX_EPOCH else max(now, earlier + 1)

    async def _publish(self, record: WorkerRecord) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        name = self._record_prefix + record.worker_id
        sealed = self._seal.seal(name, self._encoder.encode(record))
        pipeline.set(name, sealed, px=max(1, int(self.lease_s * 1000)))
        pipeline.sadd(self._ids_key, record.worker_id)
        _, added = await pipeline.execute(raise_on_error=False)
        if isinstance(added, ResponseError):
            # The key's value is not a set. The key is ours, so the value is deleted.
            await self._redis.delete(self._ids_key)
            await self._redis.sadd(self._ids_key, record.worker_id)
        elif isinstance(added, Exception):
            raise added

    async def _withdraw(self, worker_id: str) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.srem(self._ids_key, worker_id)  # first: an id without a record has expired
        pipeline.delete(self._record_prefix + worker_id)
        removed, _ = await pipeline.execute(raise_on_error=False)
        # If the value is not a set, whoever publishes next replaces it.
        if isinstance(removed, Exception) and not isinstance(removed, ResponseError):
            raise removed

    async def _list_workers(self) -> list[WorkerRecord | OtherVersion]:
        raw_ids = list(await cast("Awaitable[set[bytes]]", self._redis.smembers(self._ids_key)))
        if not raw_ids:
            return []
        prefix = self._record_prefix.encode()
        raw_records: list[Any] = await self._redis.mget([prefix + raw_id for raw_id in raw_ids])
        entries = list(zip(raw_ids, raw_records, strict=True))
        dead = [raw_id for raw_id, raw in entries if raw is None]
        if dead:
            self.expired_records += await self._redis.srem(self._ids_key, *dead)
        records = (
            self._decode(raw_id.decode(errors="replace"), raw)
            for raw_id, raw in entries
            if raw is not None
        )
        return [record for record in records if record is not None]

    async def _has_other_clusters(self) -> bool:
        cursor = 0
        for _ in range(_MAX_SCANS):
            scan = self._redis.scan(cursor, match="pagewire:*:workers", count=_SCANNED)
            cursor, keys = await scan
            if any(key != self._ids_key.encode() for key in keys):
                return True
            if not cursor:
                break
        return False

    def _decode(self, worker_id: str, raw: bytes) -> WorkerRecord | OtherVersion | None:
        try:
            record = decode_record(self._open(worker_id, raw), worker_id)
        except SealError as exc:
            self.unsealed_records += 1
            text = (
                f"ignored the worker record of {worker_id[:64]!r}: {exc}; an earlier release of "
                "Pagewire wrote it, or somebody who is not of the cluster"
            )
            self._warn_once(worker_id, "unsealed", text)
            return None
        except ProtocolError as exc:
            self.malformed_records += 1
            text = f"ignored a malformed worker record of {worker_id[:64]!r}: {exc}"
            self._warn_once(worker_id, "malformed", text)
            return None
        if isinstance(record, OtherVersion):
            self.other_version_records += 1
            text = (
                f"left out {worker_id[:64]!r}, which speaks protocol version {record.protocol!r}, "
                f"this side {PROTOCOL_VERSION}: run the same release of Pagewire everywhere"
            )
            self._warn_once(worker_id, record.protocol, text)
        return record

    def _open(self, worker_id: str, raw: bytes) -> bytes:
        """Return the record in Redis' value for a worker.

        Raises:
            ProtocolError: it is too large.
            SealError: no member of the cluster wrote it.
        """
        if len(raw) > MAX_RECORD_BYTES:
            raise ProtocolError(f"{len(raw)} bytes are more than {MAX_RECORD_BYTES}")
        return self._seal.open(self._record_prefix + worker_id, raw)

    def _epoch_in(self, worker_id: str, raw: bytes) -> int | None:
        """Return the epoch of a record of any version; None if it has none."""
        try:
            return decode_head(self._open(worker_id, raw)).known_epoch
        except ProtocolError:
            return None  # `list_workers` reports it

    def _warn_once(self, worker_id: str, problem: int | str, text: str) -> None:
        if (worker_id, problem) not in self._logged and len(self._logged) < _MAX_LOGGED_IDS:
            self._logged.add((worker_id, problem))
            logger.warning("%s", text)


class RecordPublisher:
    """Renews a worker's record in the background, and removes it at the end.

    Args:
        make_record: called before each renewal.
        heartbeat_s: interval of renewals; well below the registry's lease.

    Attributes:
        failed_renewals: renewals that Redis did not take.
    """

    def __init__(
        self, registry: Registry, make_record: Callable[[], WorkerRecord], heartbeat_s: float
    ) -> None:
        self.failed_renewals = 0
        self._registry, self._make_record, self._heartbeat_s = registry, make_record, heartbeat_s
        self._due = asyncio.Event()
        self._failing = False
        self._worker_id: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Publish the first record, then go on in the background.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        record = self._make_record()
        await self._registry.publish(record)
        self._worker_id = record.worker_id
        self._task = start_task(self._run(), "record-publisher")

    def renew_now(self) -> None:
        """Publish soon instead of with the next heartbeat, e.g. after a change of state."""
        self._due.set()

    async def close(self) -> None:
        """Stop, and remove the record if Redis is there. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        await end_task(task)
        if self._worker_id is not None:
            try:
                await self._registry.withdraw(self._worker_id)
            except RedisUnavailableError as exc:
                logger.warning(
                    "cannot remove the record of %s, which expires by itself: %s",
                    self._worker_id,
                    exc,
                )

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._due.wait()
            self._due.clear()
            await self._renew()

    async def _renew(self) -> None:
        try:
            await self._registry.publish(self._make_record())
        except RedisUnavailableError as exc:
            self.failed_renewals += 1
            if not self._failing:
                logger.warning("cannot renew the worker record: %s", exc)
            self._failing = True
        else:
            if self._failing:
                logger.info("renewing the worker record again")
            self._failing = False
