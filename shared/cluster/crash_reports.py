"""Leaves in Redis why a worker crashed, for the peers that lose their connections to it.

    pagewire:<tag>:crash:<worker id>:<epoch>    the report, msgpack with a seal; it expires

A report is written before its worker's connections end, unless Redis does not answer within a
second; so peers look once. If there is none, the worker did not crash: it was killed or cut off, or
it has said itself why it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from redis.asyncio import Redis

from pagewire.shared.base.errors import RedisUnavailableError, SealError
from pagewire.shared.cluster.record_seal import RecordSeal
from pagewire.shared.cluster.redis_client import cluster_tag, redis_call
from pagewire.shared.control.protocol import Blamed, clip_text

logger = logging.getLogger(__name__)

EXPIRY_S = 300  # longer than any peer takes to notice the loss
MAX_BYTES = 1 << 17


class CrashReport(msgspec.Struct, frozen=True):
    """How a worker's process crashed.

    Attributes:
        error: what happened.
        suspects: what peers call the requests or jobs that may be why.
        in_step: whether a step was running; if not, any request may be to blame.
    """

    error: str
    suspects: list[str]
    in_step: bool

    def blamed(self) -> Blamed:
        """Return the message about the suspects: each crash counts once."""
        return Blamed(request_ids=self.suspects, strikes=1, error=clip_text(self.error))


# Returns the crash report of a worker's run, by its id and epoch; None if it did not crash.
FindCrash = Callable[[str, int], Awaitable["CrashReport | None"]]


class CrashReports:
    """Writes and reads the reports of a cluster's workers.

    Args:
        redis: shared with others; not closed here.
        cluster_secret: separates the cluster's keys from those of others, and seals the reports.
        timeout_s: the time limit of each call to Redis.
    """

    def __init__(self, redis: Redis, cluster_secret: str, timeout_s: float = 1.0) -> None:
        self._redis, self._timeout_s = redis, timeout_s
        self._seal = RecordSeal(cluster_secret)
        self._prefix = f"pagewire:{cluster_tag(cluster_secret)}:crash:"

    async def publish(self, worker_id: str, epoch: int, report: CrashReport) -> None:
        """Write the report of a run of a worker.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        name = f"{self._prefix}{worker_id}:{epoch}"
        sealed = self._seal.seal(name, msgspec.msgpack.encode(report))
        await redis_call(self._redis.set(name, sealed, ex=EXPIRY_S), self._timeout_s)

    async def find(self, worker_id: str, epoch: int) -> CrashReport | None:
        """Return the report of a run of a worker, if it crashed and Redis answers."""
        name = f"{self._prefix}{worker_id}:{epoch}"
        try:
            call = self._redis.getrange(name, 0, MAX_BYTES)
            stored: Any = await redis_call(call, self._timeout_s)
            if not stored:
                return None
            return msgspec.msgpack.decode(self._seal.open(name, stored), type=CrashReport)
        except RedisUnavailableError as exc:
            logger.warning("cannot look up whether %s crashed: %s", worker_id, exc)
        except (SealError, msgspec.DecodeError) as exc:
            logger.warning("ignoring the crash report of %s: %s", worker_id, exc)
        return None
