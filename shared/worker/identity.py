"""The identity of a worker: its id, and the epoch that counts its starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One life of one worker.

    Attributes:
        worker_id: the same in each life.
        epoch: greater than that of each earlier life.
    """

    worker_id: str
    epoch: int
