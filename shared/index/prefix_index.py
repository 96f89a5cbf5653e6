"""Which worker has which KV blocks cached: block hash -> workers, in Redis.

    pagewire:<tag>:b:<hash>    hash: worker id -> epoch, or epoch and end of an optimistic entry
    pagewire:<tag>:w:<id>      the worker's epoch, its sign of life; gone if Redis lost data

Soft state: a wrong or missing entry costs time, never correctness. Entries of another epoch mean
nothing and are swept later. Nothing here raises into the path of a request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from pagewire.shared.aio import end_task, start_task
from pagewire.shared.cluster.redis_client import redis_call
from pagewire.shared.errors import RedisUnavailableError
from pagewire.shared.index.optimistic import OptimisticEntries
from pagewire.shared.index.scripts import ASSUME, LOOKUP, PUBLISH
from pagewire.shared.kv.block_hash import BlockHash

logger = logging.getLogger(__name__)

MAX_LOOKUP_BLOCKS = 8192
BATCH_BLOCKS = 512
MAX_PENDING = 1 << 16

_WRITE_TIMEOUT_S = 1.0
_ENTRY_TTL_S = 3600
_SIGN_TTL_S = 60
_FAILURES_TO_PAUSE = 2
_PAUSE_S = 0.5
_MAX_OPTIMISTIC_WRITES = 32
_MIN_RESYNC_INTERVAL_S = 1.0
_BACKOFF_S = (0.1, 5.0)


class PrefixIndex:
    """Looks up cached prefixes, and notes those that are about to be cached.

    After failures in a row lookups pause for a moment, so that a frozen Redis does not cost
    each request its timeout.

    Args:
        redis: shared with others; not closed here.
        tag: of the cluster, see `cluster_tag`.
        lookup_timeout_s: what a request waits for at most.

    Attributes:
        failed_lookups: lookups that Redis did not answer, or was not asked because of a pause.
    """

    def __init__(self, redis: Redis, tag: str, lookup_timeout_s: float = 0.1) -> None:
        self.failed_lookups = 0
        self._redis, self._lookup_timeout_s = redis, lookup_timeout_s
        self._entry_prefix = f"pagewire:{tag}:b:".encode()
        self._sign_prefix = f"pagewire:{tag}:w:".encode()
        self._failures = 0
        self._paused_until = 0.0
        self._recent = OptimisticEntries()
        self._writes: set[asyncio.Task[None]] = set()

    async def lookup(
        self, hashes: Sequence[BlockHash], epochs: Mapping[str, int]
    ) -> dict[str, int]:
        """Return how many leading blocks of a prompt each worker has; one round trip.

        Args:
            hashes: of the prompt's full blocks, in order; the first `MAX_LOOKUP_BLOCKS` count.
            epochs: of the live workers, by id. Entries of other epochs are ignored.

        Returns:
            Worker id -> blocks, for workers with at least one. Without an answer from Redis,
            only what this process itself assumes.
        """
        hashes = hashes[:MAX_LOOKUP_BLOCKS]
        if not hashes or not epochs:
            return {}
        counts = await self._ask(hashes, epochs)
        self._recent.extend(counts, hashes, epochs)
        return {worker_id: count for worker_id, count in counts.items() if count}

    def assume(
        self, hashes: Sequence[BlockHash], worker_id: str, epoch: int, ttl_s: float = 5.0
    ) -> None:
        """Note that a worker will have these blocks soon, since a request was placed there.

        Counts at once in this process; other routers see it a round trip later. Never waits; is
        dropped where Redis is in trouble.
        """
        hashes = hashes[:MAX_LOOKUP_BLOCKS]
        if not hashes:
            return
        self._recent.add(hashes, worker_id, epoch, time.monotonic() + ttl_s)
        if len(self._writes) < _MAX_OPTIMISTIC_WRITES and not self._is_paused():
            write = self._write_optimistic(hashes, worker_id, epoch, ttl_s)
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
            _WRITE_TIMEOUT_S,
            self._entry_prefix,
            self._sign_prefix,
            worker_id,
            epoch,
            _ENTRY_TTL_S,
            _SIGN_TTL_S,
            b"".join(added),
            b"".join(removed),
        )
        return bool(known)

    async def withdraw(self, worker_id: str) -> None:
        """Take back a worker's sign of life, so that others sweep its entries.

        Raises:
            RedisUnavailableError: Redis does not answer.
        """
        await redis_call(
            self._redis.delete(self._sign_prefix + worker_id.encode()), _WRITE_TIMEOUT_S
        )

    async def close(self) -> None:
        """End optimistic writes that are under way. Idempotent."""
        for task in list(self._writes):
            await end_task(task)

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    async def _ask(self, hashes: Sequence[BlockHash], epochs: Mapping[str, int]) -> dict[str, int]:
        if self._is_paused():
            self.failed_lookups += 1
            return {}
        now_ms = int(time.time() * 1000)
        workers = [part for worker in epochs.items() for part in worker]
        try:
            counts = await self._run(
                LOOKUP,
                self._lookup_timeout_s,
                self._entry_prefix,
                b"".join(hashes),
                now_ms,
                *workers,
            )
        except RedisUnavailableError as exc:
            self._count_failure(exc)
            return {}
        self._failures = 0
        return dict(zip(epochs, counts, strict=True))

    def _count_failure(self, exc: RedisUnavailableError) -> None:
        self.failed_lookups += 1
        self._failures += 1
        if self._failures >= _FAILURES_TO_PAUSE:
            if self._failures == _FAILURES_TO_PAUSE:
                logger.warning("the prefix index does not answer: %s", exc)
            self._paused_until = time.monotonic() + _PAUSE_S

    async def _write_optimistic(
        self, hashes: Sequence[BlockHash], worker_id: str, epoch: int, ttl_s: float
    ) -> None:
        ttl_ms = max(1, int(ttl_s * 1000))
        expires_ms = int(time.time() * 1000) + ttl_ms
        try:
            await self._run(
                ASSUME,
                _WRITE_TIMEOUT_S,
                self._entry_prefix,
                worker_id,
                epoch,
                expires_ms,
                ttl_ms,
                b"".join(hashes),
            )
        except RedisUnavailableError as exc:
            logger.debug("an optimistic entry was not written: %s", exc)

    async def _run(self, script: str, timeout: float, *arguments: Any) -> Any:
        # The script itself, not its digest: a server that was flushed or restarted knows none.
        return await redis_call(self._redis.eval(script, 0, *arguments), timeout)


class IndexPublisher:
    """Publishes what a worker caches and no longer caches, in batches, in the background.

    While Redis is away changes are kept up to a bound; past it, and whenever Redis turns out to
    have lost data, everything is published again from a snapshot.

    Args:
        snapshot: returns the hashes of all blocks that are cached now. Called in the event loop's
            thread, so it must be safe alongside the engine's; a change that it misses or has early
            is reported by `added` or `removed` afterwards.
        flush_interval_s: how long changes are collected.
        touch_interval_s: how often Redis is asked whether it still knows the worker.

    Attributes:
        failed_flushes: batches that Redis did not take.
        resyncs: how often everything was published again.
    """

    def __init__(
        self,
        index: PrefixIndex,
        worker_id: str,
        epoch: int,
        snapshot: Callable[[], Collection[BlockHash]],
        *,
        flush_interval_s: float = 0.05,
        touch_interval_s: float = 5.0,
    ) -> None:
        self.failed_flushes = 0
        self.resyncs = 0
        self._index, self._worker_id, self._epoch = index, worker_id, epoch
        self._snapshot = snapshot
        self._flush_interval_s, self._touch_interval_s = flush_interval_s, touch_interval_s
        self._lock = threading.Lock()  # guards what `added` and `removed` touch
        self._pending: dict[BlockHash, bool] = {}
        self._needs_resync = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = asyncio.Event()
        self._woken = False
        self._next_resync = 0.0
        self._refresh_at = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def pending(self) -> int:
        """Changes that wait to be published."""
        return len(self._pending)

    def start(self) -> None:
        """Begin to publish; call in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = start_task(self._run(), "index-publisher")

    def added(self, hashes: Iterable[BlockHash]) -> None:
        """Note blocks that are cached now. Callable from any thread; never waits for Redis."""
        self._note(hashes, True)

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        """Note blocks that are no longer cached. Callable from any thread."""
        self._note(hashes, False)

    def resync(self) -> None:
        """Publish everything again, soon. Callable from any thread."""
        with self._lock:
            self._needs_resync = True
            self._wake()

    async def close(self) -> None:
        """Stop, and let others sweep this worker's entries if Redis is there. Idempotent."""
        task, self._task = self._task, None
        with self._lock:
            self._loop = None
        if task is None:
            return
        await end_task(task)
        try:
            await self._index.withdraw(self._worker_id)
        except RedisUnavailableError as exc:
            logger.info("index entries of %s stay until they expire: %s", self._worker_id, exc)

    def _note(self, hashes: Iterable[BlockHash], cached: bool) -> None:
        with self._lock:
            # The last word on a block counts; writing it twice does no harm.
            for block_hash in hashes:
                self._pending[block_hash] = cached
            if len(self._pending) > MAX_PENDING:
                self._pending.clear()
                self._needs_resync = True
            self._wake()

    def _wake(self) -> None:
        if self._loop is not None and not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._due.set)

    async def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while True:
            try:
                await self._flush()
            except RedisUnavailableError as exc:
                self.failed_flushes += 1
                if backoff == _BACKOFF_S[0]:
                    logger.warning("the prefix index takes no entries: %s", exc)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _BACKOFF_S[1])
                continue
            backoff = _BACKOFF_S[0]
            await self._wait_for_work()

    async def _wait_for_work(self) -> None:
        wait_s = self._touch_interval_s
        if len(self._pending) >= BATCH_BLOCKS:
            return
        if self._needs_resync:
            wait_s = min(wait_s, max(0.0, self._next_resync - time.monotonic()))
        try:
            async with asyncio.timeout(wait_s):
                await self._due.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._flush_interval_s)

    async def _flush(self) -> None:
        now = time.monotonic()
        if now >= self._refresh_at:
            self._needs_resync = True  # before entries expire
        if self._needs_resync and now >= self._next_resync:
            await self._publish_all()
        batch = self._take_batch()
        try:
            await self._publish(batch)
        except BaseException:
            self._give_back(batch)
            raise

    def _take_batch(self) -> dict[BlockHash, bool]:
        with self._lock:
            if len(self._pending) <= BATCH_BLOCKS:
                batch, self._pending = self._pending, {}
                self._due.clear()
                self._woken = False
            else:
                keys = [key for key, _ in zip(self._pending, range(BATCH_BLOCKS), strict=False)]
                batch = {key: self._pending.pop(key) for key in keys}
            return batch

    def _give_back(self, batch: dict[BlockHash, bool]) -> None:
        with self._lock:
            self._pending = batch | self._pending  # newer words win
            if len(self._pending) > MAX_PENDING:
                self._pending.clear()
                self._needs_resync = True

    async def _publish(self, batch: dict[BlockHash, bool]) -> None:
        added = [block_hash for block_hash, cached in batch.items() if cached]
        removed = [block_hash for block_hash, cached in batch.items() if not cached]
        if not await self._index.publish(self._worker_id, self._epoch, added, removed):
            self._needs_resync = True

    async def _publish_all(self) -> None:
        now = time.monotonic()
        self._next_resync = now + _MIN_RESYNC_INTERVAL_S
        self._needs_resync = False
        # Pending changes stay: the last word on a block, they agree with the snapshot or are newer.
        hashes = list(self._snapshot())
        try:
            await self._index.publish(self._worker_id, self._epoch, [], [])
            for start in range(0, len(hashes), BATCH_BLOCKS):
                await self._publish(dict.fromkeys(hashes[start : start + BATCH_BLOCKS], True))
        except BaseException:
            self._needs_resync = True
            raise
        self._refresh_at = now + _ENTRY_TTL_S / 2
        self.resyncs += 1
