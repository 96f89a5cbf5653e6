"""Adds up how busy workers are: what they report, and what was placed on them since.

A worker's record shows the worker's load at the record's last renewal. A load report, which comes
with tokens, is newer. The load that this router has placed since the newer of the two is added,
because a burst of requests is faster than both. If there is neither a recent record nor a report,
the load of all running requests is added.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from pagewire.services.router.placement.pace import Pace
from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import NO_LOAD, Load

# A request's way to the worker, and a report's way back.
ROUND_TRIP_S = 0.05


@dataclass(frozen=True, slots=True)
class PlacedLoad:
    """The load that a request puts on the worker it was placed on.

    Attributes:
        expected_s: predicted seconds from the placement to the first token; None: nothing is to be
            learnt from it.
    """

    worker_id: str
    load: Load
    since: float
    number: int
    expected_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Arrived:
    """The newest report of a worker, and the time of its arrival."""

    report: LoadReport
    time_s: float


class InFlightLoad:
    """Sums up reports and recent placements by worker.

    Args:
        settle_s: age after which a placement is part of the worker's record.
        clock: in seconds.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s, self._clock = settle_s, clock
        self._numbers = itertools.count()
        self._entries: dict[str, dict[int, PlacedLoad]] = {}  # oldest first
        self._reports: dict[str, _Arrived] = {}
        self._changed: set[str] = set()
        self._paces: dict[str, Pace] = {}

    def add(self, worker_id: str, load: Load, expected_s: float | None = None) -> PlacedLoad:
        """Count a placement; the caller removes it when its work is done."""
        entry = PlacedLoad(worker_id, load, self._clock(), next(self._numbers), expected_s)
        self._entries.setdefault(worker_id, {})[entry.number] = entry
        self._changed.add(worker_id)
        return entry

    def remove(self, entry: PlacedLoad) -> None:
        """Stop counting a placed request as load of its worker. Idempotent."""
        entries = self._entries.get(entry.worker_id, {})
        if entries.pop(entry.number, None) is not None:
            self._changed.add(entry.worker_id)
        if not entries:
            self._entries.pop(entry.worker_id, None)

    def end_prompt(self, entry: PlacedLoad, computed_by: str) -> None:
        """Stop counting a prompt whose first token has arrived, and learn from the time it took.

        Nothing is learnt if another worker has computed it than the entry's, or if the entry's
        worker was lost meanwhile.
        """
        is_counted = entry.number in self._entries.get(entry.worker_id, {})
        self.remove(entry)
        if is_counted and entry.expected_s is not None and computed_by == entry.worker_id:
            pace = self._paces.setdefault(entry.worker_id, Pace())
            now = self._clock()
            pace.observe(entry.expected_s, now - entry.since, now)

    def pace(self, worker_id: str) -> float:
        """Return how many times as long as predicted a worker takes."""
        pace = self._paces.get(worker_id)
        return 1.0 if pace is None else pace.factor(self._clock())

    def record_report(self, worker_id: str, report: LoadReport) -> None:
        """Keep a worker's report, unless a newer one is known."""
        known = self._reports.get(worker_id)
        if known is None or _is_newer(report, known.report):
            self._reports[worker_id] = _Arrived(report, self._clock())

    def forget(self, worker_id: str) -> None:
        """Drop what is known of a lost worker, and what was placed there."""
        if self._entries.pop(worker_id, None):
            self._changed.add(worker_id)
        self._reports.pop(worker_id, None)
        self._paces.pop(worker_id, None)

    def take_changes(self) -> dict[str, tuple[Load, float]]:
        """Return the reserved loads that have changed since the last call, for other routers.

        Returns:
            Worker id -> load placed there recently, and for how many seconds at most it counts.
            If this is called after each placement, other routers never see less than that load.
        """
        changed, self._changed = self._changed, set()
        return {
            worker_id: (self.recently_placed(worker_id), self._settle_s) for worker_id in changed
        }

    def recently_placed(self, worker_id: str) -> Load:
        """Return the load that the worker's record and newest report may not include yet."""
        known = self._reports.get(worker_id)
        return self._placed_since(worker_id, self._settled(known, records_arrive=True))

    def load(self, worker_id: str, on_record: LoadReport, records_arrive: bool = True) -> Load:
        """Return a worker's load: what it last reported, and the load placed since.

        Args:
            worker_id: id of the worker.
            on_record: the load in its record in Redis.
            records_arrive: whether Redis can be read.
        """
        known = self._reports.get(worker_id)
        if known is not None and _is_newer(on_record, known.report):
            known = None
        report = on_record if known is None else known.report
        return report.load.plus(self._placed_since(worker_id, self._settled(known, records_arrive)))

    def _settled(self, known: _Arrived | None, records_arrive: bool) -> float:
        """Return the time since which placements may be missing in the worker's own numbers.

        Args:
            known: the worker's report, if it is newer than the record.
            records_arrive: whether Redis can be read.
        """
        by_record = self._clock() - self._settle_s if records_arrive else float("-inf")
        if known is None:
            return by_record
        return max(by_record, known.time_s - known.report.age_s - ROUND_TRIP_S)

    def _placed_since(self, worker_id: str, oldest: float) -> Load:
        total = NO_LOAD
        for entry in reversed(self._entries.get(worker_id, {}).values()):
            if entry.since < oldest:
                break
            total = total.plus(entry.load)
        return total


def _is_newer(report: LoadReport, other: LoadReport) -> bool:
    return (report.epoch, report.iterations) > (other.epoch, other.iterations)
