"""What this router has sent to workers that their records may not show yet.

A record's load is as old as its last renewal, and a burst of requests comes faster than that. So
what was placed lately counts on top of it, until a record must have it. While no records arrive,
everything that runs counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One request's load on one worker, in the worker's unit."""

    worker_id: str
    amount: int
    since: float
    number: int


class InFlightLoad:
    """Sums up recent placements by worker.

    Args:
        settle_s: age after which a placement is part of the worker's record.
        clock: in seconds.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s, self._clock = settle_s, clock
        self._numbers = itertools.count()
        self._entries: dict[str, dict[int, Entry]] = {}  # oldest first
        self._changed: set[str] = set()

    def add(self, worker_id: str, amount: int) -> Entry:
        """Count a placement; the caller removes it when its work is done."""
        entry = Entry(worker_id, amount, self._clock(), next(self._numbers))
        self._entries.setdefault(worker_id, {})[entry.number] = entry
        self._changed.add(worker_id)
        return entry

    def remove(self, entry: Entry) -> None:
        """Stop counting a placement. Idempotent."""
        entries = self._entries.get(entry.worker_id, {})
        if entries.pop(entry.number, None) is not None:
            self._changed.add(entry.worker_id)
        if not entries:
            self._entries.pop(entry.worker_id, None)

    def take_changes(self) -> dict[str, tuple[int, float]]:
        """Return what other routers are to know, of the workers where it has changed since.

        Returns:
            Worker id -> `pending` of it, and the seconds for which that counts at most. If each
            placement is followed by this, they never know of less than `pending`.
        """
        changed, self._changed = self._changed, set()
        return {worker_id: (self.pending(worker_id), self._settle_s) for worker_id in changed}

    def pending(self, worker_id: str, records_arrive: bool = True) -> int:
        """Return the load on top of a worker's record."""
        oldest = self._clock() - self._settle_s if records_arrive else float("-inf")
        total = 0
        for entry in reversed(self._entries.get(worker_id, {}).values()):
            if entry.since < oldest:
                break
            total += entry.amount
        return total
