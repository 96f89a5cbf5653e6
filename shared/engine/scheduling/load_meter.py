"""How busy an engine is: what waits for it, in tokens and in predicted seconds."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.shared.costs.load import Load
from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.scheduling.sequence_table import SequenceTable
from pagewire.shared.engine.scheduling.slices import chunk_room


@dataclass(frozen=True, slots=True)
class LoadMeter:
    """Measures how busy an engine is, at any moment.

    Attributes:
        table: the engine's sequences.
        costs: predicts how long a step takes.
    """

    table: SequenceTable
    costs: StepCosts

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that wait to be prefilled, here and in the running batch's chunks."""
        chunked = self.table.prefilling()
        return self.table.waiting.num_tokens + sum(each.num_uncomputed_tokens for each in chunked)

    @property
    def queued_s(self) -> float:
        """Seconds in which the prompts that wait here are computed, next to the decode rows of now.

        Those that other workers compute do not count, nor does what was cached of the others when a
        step looked them up.
        """
        work = self.table.waiting.work
        for each in self.table.prefilling():
            work = work.with_chunk(each.num_computed_tokens, each.num_uncomputed_tokens)
        if not work.tokens:
            return 0.0
        return self.costs.prices.prompts_s(work.tokens, work.products, self.room, self._row_work)

    @property
    def room(self) -> int:
        """Prompt tokens that a step has room for, next to the decode rows of now."""
        rows, limits = self._row_work, self.table.limits
        room = chunk_room(limits, self.costs, self.table.rows.gap_s, rows, 0)
        return max(1, min(room, limits.max_num_batched_tokens - rows.rows))

    @property
    def _row_work(self) -> StepWork:
        return StepWork(len(self.table.rows), self.table.rows.contexts)

    @property
    def load(self) -> Load:
        """How busy the engine is. Answers count as rows from the computing of their prompts on."""
        table = self.table
        prompts = [each for each in table.prefilling() if not each.prefill_only]
        return Load(
            blocks=table.blocks.pool.counts().used,
            tokens=self.num_queued_tokens,
            seconds=self.queued_s,
            rows=len(table.rows) + len(table.reserved) + len(prompts),
            room=self.room,
        )
