"""A router's optimistic entries: which blocks workers will soon have cached."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from pagewire.shared.kv.block_hash import BlockHash

_MAX_BLOCKS = 1 << 16


class OptimisticEntries:
    """Blocks that workers will have soon, because this process just placed a prompt there.

    They are in memory, so that a burst of equal prompts sees them without a wait. Their number is
    bounded: the oldest ones are dropped.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Oldest first. hash -> worker id -> (epoch, end in monotonic time)
        self._entries: OrderedDict[BlockHash, dict[str, tuple[int, float]]] = OrderedDict()

    def add(self, hashes: Sequence[BlockHash], worker_id: str, epoch: int, ends: float) -> None:
        """Note that a worker will have these blocks, until `ends` in monotonic time."""
        for block_hash in hashes:
            self._entries.setdefault(block_hash, {})[worker_id] = (epoch, ends)
            self._entries.move_to_end(block_hash)
        self._sweep()

    def extend(
        self, counts: dict[str, int], hashes: Sequence[BlockHash], epochs: Mapping[str, int]
    ) -> None:
        """Lengthen each worker's prefix, in place, by the blocks assumed after it."""
        self._sweep()
        if not self._entries:
            return
        now = self._clock()
        for worker_id, epoch in epochs.items():
            count = counts.get(worker_id, 0)
            while count < len(hashes) and self._has(hashes[count], worker_id, epoch, now):
                count += 1
            counts[worker_id] = count

    def _has(self, block_hash: BlockHash, worker_id: str, epoch: int, now: float) -> bool:
        entry = self._entries.get(block_hash, {}).get(worker_id)
        return entry is not None and entry[0] == epoch and entry[1] > now

    def _sweep(self) -> None:
        now = self._clock()
        while self._entries:
            block_hash, workers = next(iter(self._entries.items()))
            expired = all(ends <= now for _, ends in workers.values())
            if not expired and len(self._entries) <= _MAX_BLOCKS:
                return
            del self._entries[block_hash]
