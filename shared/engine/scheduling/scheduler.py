"""Decides what the next step computes: continuous batching with chunked prefill.

The scheduler is pure: it uses no clocks, sockets or kernels, and it returns its decision rather
than calling anybody.

Owners of sequences take turns, each owner's sequences wait in arrival order. They run in a batch,
and end. A step is scheduled before the tokens of the previous step are known. So a running sequence
may have one token in flight: the device has its value, the scheduler has already counted it.
Deciding and accounting are one: the scheduler takes the blocks at once, and `num_computed_tokens`
includes what the step will compute.

One decision goes in this order: decode rows get the blocks that they lack; sequences with one token
to compute become decode rows; running prompts get their next chunks; waiting sequences are admitted
with what is left of the token budget, those whose prompts a prefill worker computes also without.

Suspected sequences run one at a time: see `suspects.py`.

When blocks run out, the youngest running sequence is preempted: it gives up all its blocks and
waits, first of its owner's, to be computed again. So is one of the owner that has most, if there is
no room for the only sequence of another owner: nobody waits for all answers of another one.

A decode row that needs no block and does not end costs the scheduler nothing: see `DecodeBatch`.
"""

from __future__ import annotations

from pagewire.shared.base.errors import ConfigError, SchedulingError
from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.engine.scheduling.admission import Admission
from pagewire.shared.engine.scheduling.decode_batch import DecodeBatch
from pagewire.shared.engine.scheduling.load_meter import LoadMeter
from pagewire.shared.engine.scheduling.schedule import (
    PlanDraft,
    Schedule,
    ScheduledTokens,
    SchedulerLimits,
    work_of,
)
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.sequence_blocks import SequenceBlocks
from pagewire.shared.engine.scheduling.sequence_table import SequenceTable
from pagewire.shared.engine.scheduling.slices import chunk_room
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.suspects import Suspects
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool

# A step looks up what is cached of prompts with about this many tokens together, which takes about
# 1 ms; a longer one is hashed whole. To look up a short one takes as long as to hash 256 tokens.
_HASHED_TOKENS, _LEAST_TOKENS = 16384, 256


class Scheduler:
    """Decides what the sequences of its table do next.

    Args:
        limits: bound a step and the queue.
        pool: has the KV blocks.
        hasher: hashes full blocks.
        costs: predicts how long a step takes; by default, one that has yet to learn it.

    Attributes:
        table: the sequences; others add and end them between two steps.
        blocks: the blocks of the sequences.
        meter: measures the load.

    Raises:
        ConfigError: the longest sequence needs more blocks than there are.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        hasher: BlockHasher,
        costs: StepCosts | None = None,
    ) -> None:
        fits = pool.layout.longest_sequence(pool.num_blocks, limits.max_num_batched_tokens)
        if limits.max_model_len > fits:
            # Such a sequence would wait for ever for more blocks than there are.
            raise ConfigError(
                f"sequences of {limits.max_model_len} tokens do not fit into "
                f"{pool.num_blocks} KV blocks of {hasher.block_size}: lower --max-model-len or "
                "raise --num-blocks"
            )
        self.limits, self.pool, self.costs = limits, pool, costs or StepCosts()
        self._draft = PlanDraft(pool.layout, pool.layout.blocks_for(limits.max_model_len))
        self.blocks = SequenceBlocks(pool, hasher, self._draft)
        self._rows = DecodeBatch(hasher.block_size, limits.gap_s)
        self.table = SequenceTable(limits, self.blocks, self._rows, self._draft)
        self.meter = LoadMeter(self.table, self.costs)
        self._suspects = Suspects()
        self._admission = Admission(self.table, self._suspects)

    def schedule(self) -> Schedule:
        """Choose the next step and account for it.

        Raises:
            SchedulingError: something failed; names the sequences that it had changed by then.
        """
        decision = Schedule()
        try:
            self._decide(decision)
        except Exception as exc:  # any: the caller fails these sequences and no others
            names = [sequence.request_id for sequence in decision.touched]
            raise SchedulingError(names) from exc
        return decision

    def carry_over(self, decision: Schedule) -> None:
        """Carry over into the next plan what a plan that failed to launch had to report.

        Call it before the plan's sequences end, or are preempted.
        """
        if decision.plan is not None:
            self._draft.carry_over(decision.plan)

    def skip_row(self, sequence: Sequence) -> None:
        """Note that a launched step samples nothing for a sequence: the same input runs again.

        Call it before the next step is decided.
        """
        self._rows.leave(sequence)
        sequence.num_computed_tokens -= 1
        sequence.decodes_from_device = False

    def _decide(self, decision: Schedule) -> None:
        self._suspects.update()
        self._count_cached(decision)
        attended = self._attend_rows(decision)
        prefilling = self._enter_rows(decision)
        budget = self.limits.max_num_batched_tokens - len(self._rows)
        budget = self._add_chunks(prefilling, budget, decision)
        if not decision.preempted:
            budget = self._admit_waiting(budget, decision)
        if self._suspects.must_wait and not decision.chunks:
            self._run_suspect(budget, decision)  # nobody else can use the step
        if decision.preempted:
            decision.drop_preempted()
        decision.rows, decision.contexts = self._rows.rows, self._rows.contexts
        self._account_for(decision, attended)
        decision.plan = self._draft.finish(decision)

    def _count_cached(self, decision: Schedule) -> None:
        """Look up how much is cached of the prompts that came since the last step.

        After `_HASHED_TOKENS` it stops, so that a step does not wait until all of a crowd are
        hashed; the next one goes on.
        """
        waiting, left = self.table.waiting, _HASHED_TOKENS
        while left > 0 and (sequence := waiting.next_uncounted) is not None:
            decision.touched.append(sequence)  # it alone fails if it cannot be hashed
            waiting.record_cached(sequence, self.blocks.count_cached(sequence))
            decision.touched.pop()
            left -= max(_LEAST_TOKENS, len(sequence.token_ids))

    def _attend_rows(self, decision: Schedule) -> list[Sequence]:
        """Give blocks to the decode rows that lack one, and note those that end.

        Decode rows come before chunks, so that a long prompt does not delay running answers.

        Returns:
            The rows that were due for attention.
        """
        due = self._rows.due()
        if not due:
            return []
        growing: list[Sequence] = []
        ahead, size = self._rows.num_ahead, self.blocks.size
        for sequence in due:
            start, end = sequence.num_computed_tokens, sequence.run_until
            if start >= end:
                self._rows.leave(sequence)  # its last token is in flight
                continue
            if start == end - 1:
                decision.last.append(sequence)
            capacity = len(sequence.tables[-1]) * size
            if capacity < end and capacity < start + ahead:
                growing.append(sequence)
                if self.pool.layout.has_windows:
                    self.blocks.drop_unread(sequence, start)
        decision.touched += growing
        if not self.blocks.extend_each(growing):
            for sequence in growing:
                if sequence.status is RequestStatus.RUNNING:
                    self._grow(sequence, sequence.num_computed_tokens + 1, decision)
        return due

    def _enter_rows(self, decision: Schedule) -> list[Sequence]:
        """Make decode rows of sequences with one token to compute; returns those with more."""
        prefilling = []
        for sequence in self.table.prefilling():
            if not sequence.fits_row:
                prefilling.append(sequence)
            elif sequence.status is RequestStatus.RUNNING:
                self._enter_row(sequence, decision)
        return prefilling

    def _enter_row(self, sequence: Sequence, decision: Schedule) -> None:
        """Make a sequence with one token to compute a decode row, in this and the next steps."""
        start = sequence.num_computed_tokens
        if self._grow(sequence, start + 1, decision):
            self._draft.put_input(sequence, start)
            decision.entries.append(ScheduledTokens(sequence, start, start + 1, samples=True))
            sequence.decodes_from_device = True
            self._rows.join(sequence)

    def _add_chunks(self, sequences: list[Sequence], budget: int, decision: Schedule) -> int:
        """Schedule the next chunks of running sequences; returns what is left of the budget."""
        for sequence in sequences:
            if budget == 0:
                break
            if sequence.status is RequestStatus.RUNNING:
                budget -= self._add_tokens(sequence, budget, decision)
        return budget

    def _run_suspect(self, budget: int, decision: Schedule) -> None:
        """Schedule a suspect's chunk although it is the others' turn."""
        self._suspects.must_wait = False
        suspects = [sequence for sequence in self.table.prefilling() if sequence.strikes]
        self._add_chunks(suspects, budget, decision)
        chunked = [chunk.sequence for chunk in decision.chunks]
        decision.prepared = [s for s in decision.prepared if s not in chunked]

    def _admit_waiting(self, budget: int, decision: Schedule) -> int:
        """Admit from the queue while there is room; returns what is left of the budget."""
        is_full = False
        while not decision.preempted:
            is_full = is_full or budget == 0 or self._room(decision, None, 0) == 0
            admitted = self._admission.admit(decision, is_full=is_full)
            if admitted is None:
                break
            if admitted.status is RequestStatus.RUNNING:
                added = self._add_tokens(admitted, budget, decision)
                if added == 0:
                    decision.prepared.append(admitted)
                    is_full = not (admitted.strikes and self._suspects.must_wait)
                budget -= added
        return budget

    def _add_tokens(self, sequence: Sequence, budget: int, decision: Schedule) -> int:
        """Schedule what a sequence has to compute, up to the budget; returns how many tokens."""
        missing = sequence.num_uncomputed_tokens
        if sequence.fits_row:
            self._enter_row(sequence, decision)
            return 1
        start = sequence.num_computed_tokens
        end = start + min(missing, budget, self._room(decision, sequence, start))
        if start == end or not self._grow(sequence, end, decision):
            return 0
        is_all = end == len(sequence.token_ids)
        decision.chunks.append(ScheduledTokens(sequence, start, end, samples=is_all))
        return end - start

    def _room(self, decision: Schedule, sequence: Sequence | None, start: int) -> int:
        """Return how many tokens the next chunk may have, as far as time and suspicion matter.

        Args:
            decision: the step so far.
            sequence: of the chunk; None: any.
            start: position of the chunk's first token.
        """
        chunks = decision.chunks
        if chunks and chunks[0].sequence.strikes:
            return 0
        if sequence is not None and sequence.strikes and (chunks or self._suspects.must_wait):
            return 0
        rows = self._rows
        work = work_of(len(rows), rows.contexts, chunks)
        return chunk_room(self.limits, self.costs, rows.gap_s, work, start)

    def _grow(self, sequence: Sequence, end: int, decision: Schedule) -> bool:
        """Take the blocks for the tokens before `end`, preempting younger sequences for them.

        Returns:
            Whether the sequence has the blocks; if not, it was preempted itself.
        """
        decision.touched.append(sequence)
        while (missing := self.blocks.count_missing(sequence, end)) > 0:
            if missing <= self.pool.num_available:
                self.blocks.extend(sequence, end)
                break
            youngest = self.table.running[-1]
            decision.add_preempted(youngest)
            self.table.preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _account_for(self, decision: Schedule, attended: list[Sequence]) -> None:
        """Count what the step computes, and note when its rows next need attention."""
        self._rows.advance()
        for chunk in decision.chunks:
            chunk.sequence.num_computed_tokens = chunk.end
            chunk.sequence.num_chunks += 1
            self._suspects.must_wait = chunk.sequence.strikes > 0
            if chunk.samples:
                chunk.sequence.decodes_from_device = True
                if chunk.end < chunk.sequence.run_until:
                    self._rows.join(chunk.sequence)
        scheduled = [each.sequence for each in (*decision.entries, *decision.chunks)]
        self._rows.mark((*attended, *scheduled))
        for sequence in scheduled:
            if sequence.prefill_only:
                self._draft.export(sequence, self.blocks.size)
