"""Records an engine's step plans as bytes, and replays them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from pagewire.shared.engine.execution.executor import Executor, PendingStep
from pagewire.shared.engine.scheduling.step import StepPlan, StepResult, Supply

_DECODER = msgspec.msgpack.Decoder(StepPlan | Supply)


@dataclass(slots=True)
class Recorder:
    """An executor that passes everything on and keeps it.

    Attributes:
        executor: runs the plans.
        record: plans and supplies in their order, each as msgpack.
    """

    executor: Executor
    record: list[bytes] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> PendingStep:
        """Record a plan and launch it."""
        self.record.append(msgspec.msgpack.encode(plan))
        return self.executor.execute(plan)

    def supply(self, supply: Supply) -> None:
        """Record a supply and pass it on."""
        self.record.append(msgspec.msgpack.encode(supply))
        self.executor.supply(supply)


def replay(record: Iterable[bytes], executor: Executor) -> Iterator[StepResult]:
    """Run recorded plans in an executor whose device slots are unused; yields their results.

    A plan's blocks must hold what they held when it was recorded: what came from other workers is
    not part of a record.

    Raises:
        msgspec.DecodeError: this is not a record.
    """
    pending: PendingStep | None = None
    for item in record:
        step = _DECODER.decode(item)
        if isinstance(step, Supply):
            executor.supply(step)
            continue
        if pending is not None:
            yield pending.wait()
        pending = executor.execute(step)
    if pending is not None:
        yield pending.wait()
