"""Which worker has which KV blocks cached: block hash -> workers, in Redis.

    pagewire:<tag>:b:<hash>    hash: worker id -> epoch, or epoch and expiry of an optimistic entry
    pagewire:<tag>:w:<id>      the worker's epoch, its sign of life; missing if Redis lost data
    pagewire:<tag>:l:<id>      hash: router id -> load that it has reserved there, and its expiry

This is soft state: a wrong or missing entry costs time, never correctness. Entries of another epoch
are ignored, and deleted later. No error here fails a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import RedisUnavailableError
from pagewire.shared.cluster.redis_client import WRONG_REPLY, redis_call
from pagewire.shared.costs.load import NO_LOAD, Load
from pagewire.shared.index.optimistic import OptimisticEntries
from pagewire.shared.index.scripts import ASSUME, LOOKUP, PUBLISH
from pagewire.shared.kv.block_hash import BlockHash

logger = logging.getLogger(__name__)

MAX_LOOKUP_BLOCKS = 8192

ENTRY_TTL_S = 3600
_SIGN_TTL_S = 60
_FAILURES_TO_PAUSE = 2
_PAUSE_S = 0.5
_MAX_OPTIMISTIC_WRITES = 32
_NOTHING: Mapping[str, tuple[Load, float]] = {}


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a lookup.

    Attributes:
        hits: worker id -> number of leading blocks of the prompt after which it can continue;
            without workers that have none.
        reserved: worker id -> load that other routers have placed there and that the worker's
            record may not show yet.
    """

    hits: Mapping[str, int]
    reserved: Mapping[str, Load]


class PrefixIndex:
    """Looks up cached prefixes, and notes those that are about to be cached.

    After failures in a row lookups pause for a moment, so that a frozen Redis does not cost
    each request its timeout.

    Args:
        redis: shared with others; not closed here.
        tag: the cluster's tag, see `cluster_tag`.
        router_id: this router, whose own reserved load is left out of lookups.
        lookup_timeout_s: how long a request waits at most.
        write_timeout_s: how long a write, in the background, waits at most.
        note_lookup: called with the seconds of each lookup in Redis.

    Attributes:
        failed_lookups: lookups that Redis did not answer, or was not asked because of a pause.
    """

    def __init__(
        self,
        redis: Redis,
        tag: str,
        router_id: str = "",
        lookup_timeout_s: float = 0.1,
        write_timeout_s: float = 1.0,
        note_lookup: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._note_lookup = note_lookup
        self.failed_lookups = 0
        self._redis = redis
        self._lookup_timeout_s, self._write_timeout_s = lookup_timeout_s, write_timeout_s
        self._entry_prefix = f"pagewire:{tag}:b:".encode()
        self._sign_prefix = f"pagewire:{tag}:w:".encode()
        self._load_prefix, self._router_id = f"pagewire:{tag}:l:".encode(), router_id
        self._failures = 0
        self._paused_until = 0.0
        self._recent = OptimisticEntries()
        self._writes: set[asyncio.Task[None]] = set()

    async def lookup(
        self, hashes: Sequence[BlockHash], epochs: Mapping[str, int], resume_blocks: int = 0
    ) -> Found:
        """Return after how many blocks of a prompt each worker can continue, and reserved load.

        This takes one round trip. If Redis does not answer, the result has only the optimistic
        entries of this process.

        Args:
            hashes: of the prompt's full blocks, in order; the first `MAX_LOOKUP_BLOCKS` count.
            epochs: epochs of the live workers, by id. Entries of other epochs are ignored.
            resume_blocks: see `KvLayout`.
        """
        hashes = hashes[:MAX_LOOKUP_BLOCKS]
        if not epochs:
            return Found({}, {})
        hits, reserved = await self._ask(hashes, epochs, resume_blocks)
        self._recent.extend(hits, hashes, epochs)
        return Found(
            {worker_id: count for worker_id, count in hits.items() if count},
            {worker_id: load for worker_id, load in reserved.items() if load != NO_LOAD},
        )

    def add_optimistic(
        self,
        hashes: Sequence[BlockHash],
        epochs: Mapping[str, int],
        reserved: Mapping[str, tuple[Load, float]] = _NOTHING,
        ttl_s: float = 5.0,
    ) -> None:
        """Add optimistic entries for the workers of a request that was just placed.

        They count at once in this process; other routers see them a round trip later. This never
        waits, and writes nothing to Redis while Redis does not answer.

        Args:
            hashes: of the prompt's full blocks, in order; the first `MAX_LOOKUP_BLOCKS` count.
            epochs: epochs of the chosen workers, by id.
            reserved: the load that this router has now reserved on a worker, and for how many
                seconds it counts; for workers where that has changed.
            ttl_s: how long the optimistic entries are valid.
        """
        hashes = hashes[:MAX_LOOKUP_BLOCKS]
        for worker_id, epoch in epochs.items():
            self._recent.add(hashes, worker_id, epoch, time.monotonic() + ttl_s)
        if not reserved and not hashes:
            return
        if len(self._writes) < _MAX_OPTIMISTIC_WRITES and not self._is_paused():
            write = self._write_optimistic(hashes, epochs, reserved, ttl_s)
            task = start_task(write, "optimistic-entries")
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def publish(
        self,
        worker_id: str,
        epoch: int,
        added: Collection[BlockHash],
        removed: Collection[BlockHash],
    ) -> bool:
        """Write a batch of a worker's changes, see `IndexPublisher`.

        Returns:
            Whether Redis still knew the worker; if not, earlier entries may be lost.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        known = await self._run(
            PUBLISH,
            self._write_timeout_s,
            self._entry_prefix,
            self._sign_prefix,
            worker_id,
            epoch,
            ENTRY_TTL_S,
            _SIGN_TTL_S,
            b"".join(added),
            b"".join(removed),
        )
        return bool(known)

    async def withdraw(self, worker_id: str) -> None:
        """Delete a worker's sign of life, so that other workers delete its entries.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        await redis_call(
            self._redis.delete(self._sign_prefix + worker_id.encode()), self._write_timeout_s
        )

    async def close(self) -> None:
        """End optimistic writes that are under way. Idempotent."""
        for task in list(self._writes):
            await end_task(task)

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    async def _ask(
        self, hashes: Sequence[BlockHash], epochs: Mapping[str, int], resume_blocks: int
    ) -> tuple[dict[str, int], dict[str, Load]]:
        if self._is_paused():
            self.failed_lookups += 1
            return {}, {}
        workers = [part for worker in epochs.items() for part in worker]
        began = time.monotonic()
        try:
            counts = await self._run(
                LOOKUP,
                self._lookup_timeout_s,
                self._entry_prefix,
                b"".join(hashes),
                self._load_prefix,
                self._router_id,
                resume_blocks,
                *workers,
            )
            hits, reserved = counts[: len(epochs)], counts[len(epochs) :]
            reply = (
                dict(zip(epochs, map(int, hits), strict=True)),
                {name: _from_text(text) for name, text in zip(epochs, reserved, strict=True)},
            )
        except (RedisUnavailableError, *WRONG_REPLY) as exc:
            self._count_failure(exc)
            return {}, {}
        finally:
            self._note_lookup(time.monotonic() - began)
        self._failures = 0
        return reply

    def _count_failure(self, exc: Exception) -> None:
        self.failed_lookups += 1
        self._failures += 1
        if self._failures >= _FAILURES_TO_PAUSE:
            if self._failures == _FAILURES_TO_PAUSE:
                logger.warning("cannot look up cached prefixes, pausing lookups: %s", exc)
            self._paused_until = time.monotonic() + _PAUSE_S

    async def _write_optimistic(
        self,
        hashes: Sequence[BlockHash],
        epochs: Mapping[str, int],
        reserved: Mapping[str, tuple[Load, float]],
        ttl_s: float,
    ) -> None:
        workers: list[str | int] = [part for worker in epochs.items() for part in worker]
        for worker_id, (load, seconds) in reserved.items():
            workers += [worker_id, _to_text(load), _milliseconds(seconds)]
        try:
            await self._run(
                ASSUME,
                self._write_timeout_s,
                self._entry_prefix,
                b"".join(hashes),
                _milliseconds(ttl_s),
                self._load_prefix,
                self._router_id,
                len(epochs),
                *workers,
            )
        except RedisUnavailableError as exc:
            logger.debug("cannot write an optimistic index entry: %s", exc)

    async def _run(self, script: str, timeout: float, *arguments: Any) -> Any:
        # The script itself, not its digest: a server that was flushed or restarted knows none.
        return await redis_call(self._redis.eval(script, 0, *arguments), timeout)


def _to_text(load: Load) -> str:
    if load == NO_LOAD:
        return ""
    return f"{load.blocks},{load.tokens},{load.seconds * 1e6:.0f},{load.rows}"


def _from_text(text: bytes) -> Load:
    blocks, tokens, microseconds, rows = map(int, text.split(b","))
    return Load(blocks, tokens, microseconds / 1e6, rows)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
