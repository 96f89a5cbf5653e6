"""A router's optimistic entries: which blocks workers will soon have cached."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagewire.shared.kv.block_hash import BlockHash

MAX_BLOCKS = 1 << 18  # blocks of all prompts together


@dataclass(frozen=True, slots=True)
class _Placed:
    """A prompt that was placed on a worker, and until when its blocks are assumed there."""

    hashes: tuple[BlockHash, ...]
    worker: tuple[str, int]
    ends_s: float


class OptimisticEntries:
    """Blocks that workers will have soon, because this process just placed a prompt there.

    They are in memory, so that a burst of equal prompts sees them without a wait. Their number is
    bounded: the oldest ones are dropped.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # For each worker and epoch, when the last prompt with a block ends, in monotonic time.
        self._ends_s: dict[tuple[str, int], dict[BlockHash, float]] = {}
        self._placed: deque[_Placed] = deque()  # oldest first
        self._num_blocks = 0  # blocks of all workers together

    def __len__(self) -> int:
        """Return how many blocks the prompts have that are remembered."""
        return self._num_blocks

    def add(self, hashes: Sequence[BlockHash], worker_id: str, epoch: int, ends: float) -> None:
        """Note that a worker will have these blocks, until `ends` in monotonic time."""
        placed = _Placed(tuple(hashes), (worker_id, epoch), ends)
        self._ends_s.setdefault(placed.worker, {}).update(dict.fromkeys(placed.hashes, ends))
        self._placed.append(placed)
        self._num_blocks += len(placed.hashes)
        self._sweep()

    def extend(
        self, counts: dict[str, int], hashes: Sequence[BlockHash], epochs: Mapping[str, int]
    ) -> None:
        """Lengthen each worker's prefix, in place, by the blocks assumed after it."""
        self._sweep()
        now = self._clock()
        for worker in epochs.items() if self._placed else ():
            count, ends_s = counts.get(worker[0], 0), self._ends_s.get(worker, {})
            while count < len(hashes) and ends_s.get(hashes[count], now) > now:
                count += 1
            counts[worker[0]] = count

    def _sweep(self) -> None:
        now = self._clock()
        while self._placed:
            oldest = self._placed[0]
            if oldest.ends_s > now and self._num_blocks <= MAX_BLOCKS:
                return
            self._drop(self._placed.popleft())

    def _drop(self, placed: _Placed) -> None:
        """Forget a prompt's blocks, but for those of a newer one that ends later."""
        self._num_blocks -= len(placed.hashes)
        ends_s = self._ends_s.get(placed.worker, {})
        for block_hash in placed.hashes:
            if ends_s.get(block_hash) == placed.ends_s:
                del ends_s[block_hash]
        if not ends_s:
            self._ends_s.pop(placed.worker, None)
