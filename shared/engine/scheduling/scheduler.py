"""Decides what the next step computes: continuous batching with chunked prefill.

The scheduler is pure: it uses no clocks, sockets or kernels, and it returns its decision rather
than calling anybody.

Owners of sequences take turns, each owner's sequences wait in arrival order. They run in a batch,
and end. A step is scheduled before the tokens of
the previous step are known. So a running sequence may have one token in flight: the device has its
value, the scheduler has already counted it. Deciding and accounting are one: the scheduler takes
the blocks at once, and `num_computed_tokens` includes what the step will compute.

One decision goes in this order: decode rows get the blocks that they lack; sequences with one token
to compute become decode rows; running prompts get their next chunks; waiting sequences are admitted
with what is left of the token budget.

Suspected sequences run one at a time: see `suspects.py`.

When blocks run out, the youngest running sequence is preempted: it gives up all its blocks and
waits, first of its owner's, to be computed again. So is one of the owner that has most, if there is
no room for the only sequence of another owner: nobody waits for all answers of another one.

A decode row that needs no block and does not end costs the scheduler nothing: see `DecodeBatch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.shared.base.errors import SchedulingError
from pagewire.shared.engine.scheduling.schedule import Schedule, ScheduledTokens, work_of
from pagewire.shared.engine.scheduling.sequence import Sequence, device_slot_of
from pagewire.shared.engine.scheduling.sequence_table import SequenceTable
from pagewire.shared.engine.scheduling.slices import chunk_room
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.suspects import Suspects
from pagewire.shared.kv.block_table import BlockTable


@dataclass(slots=True)
class Scheduler(SequenceTable):
    """Decides what the sequences of its table do next."""

    _num_plans: int = 0
    _suspects: Suspects = field(default_factory=Suspects)

    # One step

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

    def take_back(self, decision: Schedule) -> None:
        """Take over into the next plan what a plan that failed to launch had to report.

        Call it before the plan's sequences end, or are preempted.
        """
        if decision.plan is not None:
            self._draft.take_back(decision.plan)

    def hold(self, sequence: Sequence) -> None:
        """Note that a launched step samples nothing for a sequence: the same input runs again.

        Call it before the next step is decided.
        """
        self._decoding.leave(sequence)
        sequence.num_computed_tokens -= 1
        sequence.decodes_from_device = False

    def _decide(self, decision: Schedule) -> None:
        self._suspects.update()
        attended = self._attend_rows(decision)
        prefilling = self._enter_rows(decision)
        budget = self.limits.max_num_batched_tokens - len(self._decoding)
        budget = self._add_chunks(prefilling, budget, decision)
        if not decision.preempted:
            budget = self._admit_waiting(budget, decision)
        if self._suspects.must_wait and not decision.chunks:
            self._run_suspect(budget, decision)  # nobody else can use the step
        if decision.preempted:
            decision.drop_preempted()
        decision.rows, decision.contexts = self._decoding.rows, self._decoding.contexts
        self._account_for(decision, attended)
        decision.plan = self._draft.plan(self._num_plans + 1, decision)
        if decision.plan is not None:
            self._num_plans += 1
            self._draft = self._new_draft()

    def _attend_rows(self, decision: Schedule) -> list[Sequence]:
        """Give blocks to the decode rows that lack one, and note those that end.

        Decode rows come before chunks, so that a long prompt does not delay running answers.

        Returns:
            The rows that were due for attention.
        """
        due = self._decoding.due()
        if not due:
            return []
        growing: list[Sequence] = []
        ahead, size = self._decoding.num_ahead, self.block_size
        for sequence in due:
            start, end = sequence.num_computed_tokens, sequence.run_until
            if start >= end:
                self._decoding.leave(sequence)  # its last token is in flight
                continue
            if start == end - 1:
                decision.last.append(sequence)
            capacity = len(sequence.tables[-1]) * size
            if capacity < end and capacity < start + ahead:
                growing.append(sequence)
                if self.pool.layout.has_windows:
                    self._drop_unread(sequence, start)
        if len(growing) * len(self.pool.layout.groups) <= self.pool.num_available:
            self._grow_by_one(growing, decision)
        else:
            for sequence in growing:
                if sequence.status is RequestStatus.RUNNING:
                    self._grow(sequence, sequence.num_computed_tokens + 1, decision)
        return due

    def _grow_by_one(self, growing: list[Sequence], decision: Schedule) -> None:
        """Give each row one more block in each cache group, with one allocation for each group."""
        decision.touched += growing
        slots = [device_slot_of(sequence) for sequence in growing]
        entries = self._draft.blocks
        for group in range(len(self.pool.layout.groups)):
            tables = [sequence.tables[group] for sequence in growing]
            blocks, before = self.pool.allocate(len(growing)), group * self._max_blocks
            entries.slots.extend(slots)
            entries.positions.extend([before + len(table) for table in tables])
            entries.block_ids.extend(blocks)
            for table, block in zip(tables, blocks, strict=True):
                table.block_ids.append(block)

    def _enter_rows(self, decision: Schedule) -> list[Sequence]:
        """Make decode rows of sequences with one token to compute; returns those with more."""
        if len(self._decoding) == len(self.running):
            return []
        prefilling = []
        for sequence in [s for s in self.running if not s.decodes_from_device]:
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
            self._decoding.join(sequence)

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
        suspects = [s for s in self.running if s.strikes and not s.decodes_from_device]
        self._add_chunks(suspects, budget, decision)
        chunked = [chunk.sequence for chunk in decision.chunks]
        decision.prepared = [s for s in decision.prepared if s not in chunked]

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
        rows = self._decoding
        work = work_of(len(rows), rows.contexts, chunks)
        return chunk_room(self.limits, self.costs, rows.gap_s, work, start)

    def _grow(self, sequence: Sequence, end: int, decision: Schedule) -> bool:
        """Take the blocks for the tokens before `end`, preempting younger sequences for them.

        Returns:
            Whether the sequence has the blocks; if not, it was preempted itself.
        """
        decision.touched.append(sequence)
        while (missing := self._missing_blocks(sequence, end)) > 0:
            if missing <= self.pool.num_available:
                self._take_blocks(sequence, end)
                break
            if self._preempt_youngest(decision) is sequence:
                return False
        return True

    def _missing_blocks(self, sequence: Sequence, end: int) -> int:
        """Return how many blocks a sequence lacks for the tokens before `end`, in all groups."""
        needed = self._blocks_for(end)
        return sum(max(0, needed - len(table)) for table in sequence.tables)

    def _take_blocks(self, sequence: Sequence, end: int) -> None:
        slot, needed = device_slot_of(sequence), self._blocks_for(end)
        for group, table in enumerate(sequence.tables):
            first = len(table)
            if first < needed:
                table.block_ids += self.pool.allocate(needed - first)
                self._draft.add_entries(slot, group, table, first)

    def _account_for(self, decision: Schedule, attended: list[Sequence]) -> None:
        """Count what the step computes, and note when its rows next need attention."""
        self._decoding.advance()
        for chunk in decision.chunks:
            chunk.sequence.num_computed_tokens = chunk.end
            chunk.sequence.num_chunks += 1
            self._suspects.must_wait = chunk.sequence.strikes > 0
            if chunk.samples:
                chunk.sequence.decodes_from_device = True
                if chunk.end < chunk.sequence.run_until:
                    self._decoding.join(chunk.sequence)
        scheduled = [each.sequence for each in (*decision.entries, *decision.chunks)]
        self._decoding.mark((*attended, *scheduled))
        for sequence in scheduled:
            if sequence.prefill_only:
                self._draft.export(sequence, self.block_size)

    # Admission and preemption

    def _admit_waiting(self, budget: int, decision: Schedule) -> int:
        """Admit from the queue while there is room; returns what is left of the budget."""
        while (
            budget > 0
            and self._room(decision, None, 0) > 0
            and (admitted := self._admit(decision)) is not None
        ):
            if admitted.status is RequestStatus.RUNNING:
                added = self._add_tokens(admitted, budget, decision)
                if added == 0:
                    decision.prepared.append(admitted)
                    if not (admitted.strikes and self._suspects.must_wait):
                        break
                budget -= added
        return budget

    def _admit(self, decision: Schedule) -> Sequence | None:
        """Give the first in the queue its blocks and a device slot, if there are enough of both."""
        if (sequence := self._suspects.first_of(self.waiting)) is None:
            return None
        if sequence.num_late_tokens > 0:
            return None  # it was preempted while a step ran; that step's token is not known yet
        if not self._free_device_slots:
            self._make_way(sequence, 0, decision)
            return None
        if sequence.remote_prefill and self._draft.copies:
            return None  # arriving KV could overwrite a block that this plan still copies from
        decision.touched.append(sequence)
        tables = self._usable_prefix(sequence)
        num_cached = len(tables[0])
        uncomputed = len(sequence.token_ids) - num_cached * self.block_size
        is_remote = sequence.remote_prefill and uncomputed > self._local_tokens(sequence)
        missing, later = self._blocks_to_admit(sequence, tables, is_remote)
        reserve = self.limits.watermark_blocks if self.running or self.reserved else 0
        cached = [block for table in tables for block in table.held]
        available = self.pool.num_available - self.pool.num_evictable(cached)
        if sum(missing) + later + reserve > available:
            self._make_way(sequence, sum(missing) + later, decision)
            return None
        self.pool.acquire(cached)
        sequence.tables = tables  # before anything can fail, so that they are released in any case
        for table, count in zip(tables, missing, strict=True):
            table.block_ids += self.pool.allocate(count)
        self.waiting.remove(sequence.spec.owner, sequence)
        self._suspects.admit(sequence)
        sequence.remote_prefill = is_remote
        sequence.num_computed_tokens = num_cached * self.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            decision.admitted.append(sequence)
        self._take_device_slot(sequence)
        self._let_run_or_reserve(sequence, decision)
        return sequence

    def _local_tokens(self, sequence: Sequence) -> int:
        asked = sequence.local_prefill_tokens
        return self.limits.local_prefill_tokens if asked is None else asked

    def _let_run_or_reserve(self, sequence: Sequence, decision: Schedule) -> None:
        if not sequence.remote_prefill:
            sequence.transition(RequestStatus.RUNNING)
            self.running.append(sequence)
            return
        sequence.transition(RequestStatus.RESERVED)
        self.reserved[sequence.request_id] = sequence
        decision.reserved.append(sequence)
        self._draft.expect(sequence, self.block_size)

    def _blocks_to_admit(
        self, sequence: Sequence, tables: list[BlockTable], is_remote: bool
    ) -> tuple[list[int], int]:
        """Return how many blocks a sequence gets at its admission, and how many soon after.

        In a group without a window, it gets the blocks of all its tokens at once. In a group with a
        window, a remote prefill fills only the blocks that the next token reads; a prompt that is
        computed here gets its blocks chunk by chunk.

        Args:
            sequence: the one to be admitted.
            tables: its cached blocks; those that a remote prefill makes superfluous are removed.
            is_remote: a prefill worker will compute the prompt.

        Returns:
            The blocks to take now, for each group; and the number of blocks that the first chunk
            will take in groups with a window.
        """
        layout, num_tokens = self.pool.layout, len(sequence.token_ids)
        needed, num_cached = layout.blocks_for(num_tokens), len(tables[0])
        chunk = num_cached * self.block_size + self.limits.max_num_batched_tokens
        missing, later = [], 0
        for number, (group, table) in enumerate(zip(layout.groups, tables, strict=True)):
            if group.window is None:
                missing.append(needed - num_cached)
            elif is_remote:
                first = layout.first_block(number, num_tokens)
                table.drop_before(first)
                table.skip_to(first)
                missing.append(needed - len(table))
            else:
                missing.append(0)
                later += min(needed, layout.blocks_for(chunk)) - num_cached
        return missing, later

    def _preempt_youngest(self, decision: Schedule) -> Sequence:
        return self._preempt(self.running[-1], decision)

    def _preempt(self, victim: Sequence, decision: Schedule) -> Sequence:
        decision.touched.append(victim)
        decision.preempted.append(victim)
        self.preempt(victim)
        return victim

    def _make_way(self, sequence: Sequence, num_blocks: int, decision: Schedule) -> None:
        """Preempt a sequence of the owner that has most, for the first one of another owner.

        The next step admits that one, if it lacks at most half of all blocks.
        """
        turns = self.waiting.num_turns
        if turns(sequence.spec.owner) or 2 * num_blocks > self.pool.num_blocks:
            return
        victims = [each for each in reversed(self.running) if not each.prefill_only]
        victim = max(victims, key=lambda each: turns(each.spec.owner), default=None)
        if victim is not None and turns(victim.spec.owner) > 1:
            self._preempt(victim, decision)
