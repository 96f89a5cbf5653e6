"""`Launched`, a step on the device, and `EngineStats`, counters of all steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.shared.engine.execution.executor import PendingStep
from pagewire.shared.engine.scheduling.schedule import Schedule
from pagewire.shared.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class EngineStats:
    """Counts what an engine has done since it started.

    Attributes:
        rows_skipped: rows that sampled nothing in a step, because their mask was late.
    """

    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    rows_skipped: int = 0


@dataclass(slots=True)
class Launched:
    """A step on the device whose result has not been read.

    Attributes:
        schedule: the sequences that it computes.
        pending: its result, once the device is done.
        awaits_masks: its forward is launched, but its sampling waits for masks.
        lost: sequences that ended or were preempted after the launch. They have lost their blocks,
            so what the step computes for them is not kept.
        skipped: sequences that sample nothing in this step, because their mask is late.
    """

    schedule: Schedule
    pending: PendingStep
    awaits_masks: bool = False
    lost: set[Sequence] = field(default_factory=set)
    skipped: set[Sequence] = field(default_factory=set)

    @property
    def number(self) -> int:
        """Number of the plan that was launched; 0 without a plan."""
        return 0 if self.schedule.plan is None else self.schedule.plan.number

    def is_done(self) -> bool:
        """Whether its result is here, without waiting."""
        return not self.awaits_masks and self.pending.is_done()

    def individual(self, row_tokens: list[int]) -> set[Sequence]:
        """Return the sequences whose tokens must be looked at one by one.

        Such a token is a sequence's first or last one, was not sampled (`skipped`), or belongs to
        a sequence that has lost its blocks (`lost`).
        """
        schedule, rows = self.schedule, self.schedule.rows
        parts = (*schedule.entries, *schedule.chunks)
        individual = {*self.lost, *self.skipped, *schedule.last}
        individual.update([part.sequence for part in parts])
        if not rows.stop_token_ids.isdisjoint(row_tokens):
            pairs = zip(rows.sequences, row_tokens, strict=True)
            individual.update(s for s, token in pairs if token in s.stop_token_ids)
        return individual
