"""Makes a worker's load reports."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.shared.control.protocol import LoadReport
from pagewire.shared.engine.thread import EngineThread


@dataclass(frozen=True, slots=True)
class LoadReports:
    """Makes load reports.

    Attributes:
        epoch: number of this run of the worker.
        engine: its engine.
    """

    epoch: int
    engine: EngineThread

    def recent(self) -> LoadReport:
        """Return the load at most a few steps ago. From any thread."""
        return LoadReport(self.epoch, self.engine.iterations, self.engine.snapshot.load)

    def current(self) -> LoadReport:
        """Return the load now. Only in the engine's thread."""
        return LoadReport(self.epoch, self.engine.iterations, self.engine.core.scheduler.load)
