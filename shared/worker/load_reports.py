"""Makes the reports by which routers know how busy a worker is."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.costs.load import Load
from pagewire.shared.engine.thread import EngineThread


@dataclass(frozen=True, slots=True)
class LoadReports:
    """Makes reports of how busy this worker is.

    Attributes:
        epoch: number of this run of the worker.
        engine: its engine.
    """

    epoch: int
    engine: EngineThread

    def recent(self) -> LoadReport:
        """Return the load at most a few steps ago. From any thread."""
        snapshot = self.engine.snapshot
        return self._report(snapshot.iterations, snapshot.load, snapshot.as_of_s)

    def current(self) -> LoadReport:
        """Return the load now. Only in the engine's thread."""
        load = self.engine.core.scheduler.meter.load
        return self._report(self.engine.iterations, load, self.engine.commands_s)

    def _report(self, iterations: int, load: Load, as_of_s: float) -> LoadReport:
        age_s = round(time.monotonic() - as_of_s, 3)
        return LoadReport(self.epoch, iterations, load, age_s)
