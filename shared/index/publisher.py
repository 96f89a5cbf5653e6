"""Publishes a worker's cached blocks to the prefix index, in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable

from pagewire.shared.base.aio import end_task, start_task
from pagewire.shared.base.errors import RedisUnavailableError
from pagewire.shared.index.prefix_index import ENTRY_TTL_S, PrefixIndex
from pagewire.shared.kv.block_hash import BlockHash

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 512
MAX_PENDING = 1 << 16

_MIN_RESYNC_INTERVAL_S = 1.0
_BACKOFF_S = (0.1, 5.0)


class IndexPublisher:
    """Publishes changes of a worker's prefix cache in batches, in the background.

    While Redis is down, changes are kept up to a bound. Beyond it, and if Redis has lost data,
    everything is published again from a snapshot.

    Args:
        snapshot: returns the hashes of all blocks that are cached now. It is called in the event
            loop's thread while the engine's thread runs, so it may miss a change or have one early;
            `added` or `removed` reports that change afterwards.
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
        """Stop, and let others delete this worker's entries if Redis answers. Idempotent."""
        task, self._task = self._task, None
        with self._lock:
            self._loop = None
        if task is None:
            return
        await end_task(task)
        try:
            await self._index.withdraw(self._worker_id)
        except RedisUnavailableError as exc:
            logger.info(
                "cannot remove the index entries of %s; they will expire: %s", self._worker_id, exc
            )

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
                    logger.warning("cannot write to the prefix index: %s", exc)
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
        except BaseException:  # cancelled, too: what was not sent is sent later
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
        except BaseException:  # cancelled, too: a part may be missing
            self._needs_resync = True
            raise
        self._refresh_at = now + ENTRY_TTL_S / 2
        self.resyncs += 1
