"""The identity of a worker's run: its id and its epoch, which `Registry.new_epoch` chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Names a worker and one of its runs.

    Attributes:
        worker_id: the same in each run.
        epoch: greater than in each earlier run.
    """

    worker_id: str
    epoch: int
