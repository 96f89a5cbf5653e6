"""Engine threads and their outputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.step_output import StepOutput, StepOutputs
from pagewire.shared.engine.thread import Command, EngineThread


@dataclass
class Outputs:
    """Collects an engine's outputs, and the names of the threads that delivered them."""

    said: list[StepOutput] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def __call__(self, outputs: StepOutputs) -> None:
        self.threads.add(threading.current_thread().name)
        self.said.extend(outputs)

    def tokens(self, request_id: str) -> list[int]:
        return [t for o in self.said if o.request_id == request_id for t in o.token_ids]

    def has_ended(self, request_id: str) -> bool:
        return any(o.finish_reason for o in self.said if o.request_id == request_id)


def adding(sequence: Sequence) -> Command:
    """Return the command that adds a sequence."""
    return lambda core: core.sequences.add(sequence)


@contextmanager
def started(
    core: EngineCore, outputs: Outputs | None = None, **options: Any
) -> Iterator[EngineThread]:
    """Run an engine's thread, with options of `EngineThread`."""
    engine = EngineThread(core, outputs or Outputs(), **options)
    engine.start()
    try:
        yield engine
    finally:
        assert engine.stop(5.0)
