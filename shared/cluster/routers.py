"""Lets the routers of a cluster find one another through Redis.

    pagewire:<tag>:routers    hash: router id -> seal and record, with the time when it expires

The time is by Redis' clock, because hosts' clocks differ.

A record has a URL that other routers read, so it is sealed (`record_seal.py`): someone who can only
write to Redis cannot make a router read a URL.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import UNDECODABLE, RedisUnavailableError, SealError
from pagewire.shared.cluster.record_seal import RecordSeal
from pagewire.shared.cluster.redis_client import WRONG_REPLY, cluster_tag, redis_call
from pagewire.shared.control.protocol import Epoch, Id

logger = logging.getLogger(__name__)

RouterState = Literal["starting", "ready", "draining"]

MAX_ROUTERS = 256
_TIMEOUT_S = 1.0
_KEY_TTL_MS = 3600 * 1000  # a cluster that has gone leaves nothing


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a router publishes about itself.

    Attributes:
        epoch: number of this run of the router; a later run under the same id has a greater one.
        metrics_endpoint: base URL of its own `/metrics`.
        state: a starting router still waits for the workers that it expects.
        expires_ms: by Redis' clock; the router counts as dead then, unless it renews the record.
    """

    router_id: Id
    epoch: Epoch
    metrics_endpoint: Annotated[str, Meta(max_length=512)]
    expires_ms: Epoch
    state: RouterState = "ready"


class RouterDirectory:
    """Announces this router, and knows the others.

    Args:
        redis: shared with others; not closed here.
        cluster_secret: seals the records.
        router_id: this router's id.
        interval_s: how often the record is renewed and the others' are read.
        lease_s: how long a record is valid.
        state: returns this router's state; called before each renewal.
        clock: returns a time in seconds.

    Attributes:
        expired_records: records of routers that ended without removing them, and that this router
            was the first to remove.
    """

    def __init__(
        self,
        redis: Redis,
        cluster_secret: str,
        router_id: str,
        interval_s: float,
        lease_s: float,
        state: Callable[[], RouterState],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.expired_records = 0
        self._redis, self._router_id, self._epoch = redis, router_id, time.time_ns()
        self._clock, self._ahead_s = clock, 0.0  # Redis' clock is ahead by this
        self._interval_s, self._lease_s, self._state = interval_s, lease_s, state
        self._key = f"pagewire:{cluster_tag(cluster_secret)}:routers"
        self._seal = RecordSeal(cluster_secret)
        self._metrics_endpoint = ""
        self._others: dict[str, RouterRecord] = {}
        self._answers = False  # Redis, at the last renewal
        self._task: asyncio.Task[None] | None = None

    def own(self) -> RouterRecord:
        """Return this router's record as it is now."""
        return RouterRecord(
            router_id=self._router_id,
            epoch=self._epoch,
            metrics_endpoint=self._metrics_endpoint,
            expires_ms=self._now_ms() + int(self._lease_s * 1000),
            state=self._state(),
        )

    def others(self) -> list[RouterRecord]:
        """Return the records of the other routers that are alive, by id.

        While Redis does not answer, no router can renew its record, so the last view stays.
        """
        now = self._now_ms() if self._answers else 0
        return [other for _, other in sorted(self._others.items()) if other.expires_ms > now]

    async def start(self, metrics_endpoint: str) -> None:
        """Announce this router, then go on in the background. Redis may be away."""
        self._metrics_endpoint = metrics_endpoint
        await self._renew()
        self._task = start_task(self._run(), "router-directory")

    async def close(self) -> None:
        """Remove the record if Redis answers. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await end_task(task)
        try:
            await redis_call(self._redis.hdel(self._key, self._router_id), _TIMEOUT_S)
        except RedisUnavailableError as exc:
            logger.info(
                "cannot remove the record of %s, which expires by itself: %s", self._router_id, exc
            )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._renew()

    async def _renew(self) -> None:
        """Write the own record and read the others'."""
        try:
            seconds, micros = await redis_call(self._redis.time(), _TIMEOUT_S)
            self._ahead_s = seconds + micros / 1e6 - self._clock()
            await self._exchange()
            self._answers = True
        except (RedisUnavailableError, *WRONG_REPLY) as exc:  # the worker directory warns of it
            self._answers = False
            logger.debug("cannot renew the routers' records: %s", exc)

    async def _exchange(self) -> None:
        record = self._seal.seal(self._place(self._router_id), msgspec.msgpack.encode(self.own()))
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(self._key, self._router_id, record)
        pipeline.pexpire(self._key, _KEY_TTL_MS)
        pipeline.hgetall(self._key)
        *_, entries = replies = await redis_call(pipeline.execute(raise_on_error=False), _TIMEOUT_S)
        if error := next((reply for reply in replies if isinstance(reply, RedisError)), None):
            if str(error).startswith("WRONGTYPE"):  # the key is ours, so its value is garbage
                await redis_call(self._redis.delete(self._key), _TIMEOUT_S)
            raise RedisUnavailableError(f"Redis: {error}")
        await self._take(entries)

    async def _take(self, entries: dict[bytes, bytes]) -> None:
        """Keep the records of live routers; remove expired ones and those without a seal.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        now, alive = self._now_ms(), dict[str, RouterRecord]()
        unsealed, expired = list[bytes](), list[bytes]()
        entries.pop(self._router_id.encode(), None)
        for field, sealed in entries.items():
            router_id = field.decode(errors="replace")
            try:
                raw = self._seal.open(self._place(router_id), sealed)
                record = msgspec.msgpack.decode(raw, type=RouterRecord)
            except SealError:
                unsealed.append(field)
            except UNDECODABLE:
                logger.debug(
                    "ignoring the record of %s: written by another release, which will remove it",
                    router_id,
                )
            else:
                if record.expires_ms > now:
                    alive[router_id] = record
                else:
                    expired.append(field)
        if unsealed:
            await redis_call(self._redis.hdel(self._key, *unsealed), _TIMEOUT_S)
        if expired:
            removed = await redis_call(self._redis.hdel(self._key, *expired), _TIMEOUT_S)
            self.expired_records += removed
        self._others = dict(itertools.islice(alive.items(), MAX_ROUTERS))

    def _place(self, router_id: str) -> str:
        return f"{self._key}:{router_id}"

    def _now_ms(self) -> int:
        return int((self._clock() + self._ahead_s) * 1000)
