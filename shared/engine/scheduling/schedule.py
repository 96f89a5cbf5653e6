"""The scheduler's limits, and its result for a step: the plan, and the sequences that are in it.

scheduler.py makes the decisions, and parts collect what they mean for the device in `PlanDraft`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.scheduling.decode_batch import NO_ROWS, DecodeRows
from pagewire.shared.engine.scheduling.sequence import Sequence, device_slot_of
from pagewire.shared.engine.scheduling.step import (
    DecodeInput,
    Expect,
    Export,
    KvWork,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    TableEntries,
    Withdraw,
)
from pagewire.shared.kv.block_table import BlockTable
from pagewire.shared.kv.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a batch and of the queue.

    Attributes:
        max_num_seqs: sequences that run at once; each has a device slot. It is effectively at most
            `max_num_batched_tokens`.
        max_num_batched_tokens: tokens that one step may compute.
        max_model_len: tokens of one sequence, output included.
        max_waiting: sequences in the queue.
        watermark_blocks: blocks that an admission leaves free, so that running sequences can grow.
        local_prefill_tokens: a prompt with at most this many uncached tokens is computed here, not
            by a prefill worker.
        step_s: a step has no more prompt tokens than it computes in about this many seconds.
        gap_s: the objective of decode rows whose requests have no `slo_gap_s`, see `slices.py`.
        step_sizes: numbers of tokens of the steps that CUDA graphs replay, ascending.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int
    watermark_blocks: int = 0
    local_prefill_tokens: int = 0
    step_s: float = math.inf
    gap_s: float = math.inf
    step_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens of one sequence that the host knows and a step runs.

    Attributes:
        start: position of the first token.
        end: position after the last token.
        samples: a token is sampled after the last one.
    """

    sequence: Sequence
    start: int
    end: int
    samples: bool

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens are run, if they begin in the prompt."""
        return self.end - self.start if self.start < self.sequence.num_prompt_tokens else 0


def work_of(rows: int, contexts: int, chunks: list[ScheduledTokens]) -> StepWork:
    """Return the work of a step with these chunks, and decode rows with these contexts."""
    work = StepWork(rows, contexts)
    for chunk in chunks:
        work = work.with_chunk(chunk.start, chunk.end - chunk.start)
    return work


@dataclass(slots=True)
class Schedule:
    """The scheduler's decision about one step; its blocks and tokens are already accounted for.

    Attributes:
        plan: None if there is nothing to run and nothing to report.
        rows: of the plan's decode rows, in its order.
        contexts: tokens that they together attend to.
        chunks: of the plan, in its order.
        entries: rows whose input token comes from the host: each sequence's first row after its
            admission, or after a step in which it was skipped.
        last: rows whose next token is their last one because of the length.
        prepared: sequences that were admitted, with a device slot, and compute nothing yet.
        reserved: sequences whose blocks now wait for another worker's KV.
        preempted: sequences that lost their blocks.
        admitted: sequences that got blocks for the first time.
        touched: sequences whose blocks or device slots this decision has changed. They fail if the
            decision fails.
        is_spoilt: the step was launched before the failure of an earlier one was known. Its result
            does not count: what it computes has ended, or is computed again.
    """

    plan: StepPlan | None = None
    rows: DecodeRows = NO_ROWS
    contexts: int = 0
    chunks: list[ScheduledTokens] = field(default_factory=list)
    entries: list[ScheduledTokens] = field(default_factory=list)
    last: list[Sequence] = field(default_factory=list)
    prepared: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    touched: list[Sequence] = field(default_factory=list)
    is_spoilt: bool = False

    @property
    def computed(self) -> list[Sequence]:
        """The sequences of the plan's rows and chunks."""
        return [*self.rows.sequences, *(chunk.sequence for chunk in self.chunks)]

    @property
    def sequences(self) -> list[Sequence]:
        """All that the plan computes, prepares or reserves."""
        return [*self.computed, *self.prepared, *self.reserved]

    @property
    def exporting(self) -> set[str]:
        """The names of the prefill jobs whose blocks may be sent once the plan has run."""
        work = [] if self.plan is None else self.plan.kv
        return {each.request_id for each in work if isinstance(each, Export)}

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the step's result."""
        return [*self.rows.sequences, *(chunk.sequence for chunk in self.chunks if chunk.samples)]

    @property
    def work(self) -> StepWork:
        """Numbers of tokens that the plan computes, which predict its duration."""
        return work_of(len(self.rows), self.contexts, self.chunks)

    @property
    def has_grammar(self) -> bool:
        """Whether a row that samples follows a grammar."""
        chunks = self.chunks
        return bool(self.rows.constrained) or any(
            chunk.samples and chunk.sequence.spec.grammar is not None for chunk in chunks
        )

    def add_preempted(self, sequence: Sequence) -> None:
        """Note that a sequence is preempted, before it is."""
        self.touched.append(sequence)
        self.preempted.append(sequence)

    def drop_preempted(self) -> None:
        """Take out what was chosen for sequences that were preempted afterwards."""
        gone = set(self.preempted)
        self.entries = [entry for entry in self.entries if entry.sequence not in gone]
        self.last = [sequence for sequence in self.last if sequence not in gone]
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence not in gone]


@dataclass(slots=True)
class PlanDraft:
    """The next plan so far, without its rows.

    Attributes:
        layout: of the blocks.
        max_blocks: of a sequence in one group. A device slot's table has that many entries for each
            group, one group after the other.
        number: of the plan before.
    """

    layout: KvLayout
    max_blocks: int
    number: int = 0
    freed: list[int] = field(default_factory=list)
    new_slots: list[NewDeviceSlot] = field(default_factory=list)
    blocks: TableEntries = field(default_factory=TableEntries)
    copies: dict[int, int] = field(default_factory=dict)  # target -> source
    inputs: list[DecodeInput] = field(default_factory=list)
    kv: list[KvWork] = field(default_factory=list)

    def add_device_slot(self, sequence: Sequence) -> None:
        """Note the owner of a device slot, and its blocks so far.

        Grammars stay here: the device gets masks.
        """
        slot, spec = device_slot_of(sequence), sequence.spec
        if spec.grammar is not None:
            spec = msgspec.structs.replace(spec, grammar=None)
        new = NewDeviceSlot(slot, spec)
        if spec.is_shaped:
            stops = sorted(sequence.stop_token_ids)
            tokens = list(sequence.token_ids)
            new = NewDeviceSlot(slot, spec, tokens, sequence.output_start, stops)
        self.new_slots.append(new)
        self.add_blocks(sequence, 0)

    def add_blocks(self, sequence: Sequence, first: int) -> None:
        """Note the blocks of a sequence from position `first` on."""
        slot = device_slot_of(sequence)
        for group, table in enumerate(sequence.tables):
            self.add_entries(slot, group, table, first)

    def add_entries(self, slot: int, group: int, table: BlockTable, first: int) -> None:
        """Note the blocks of one group from position `first` on."""
        first = max(first, table.first)
        self.blocks.add(slot, group * self.max_blocks + first, table.block_ids[first:])

    def put_input(self, sequence: Sequence, position: int) -> None:
        """Note the token of a row that no step has left in its device slot."""
        token = sequence.token_ids[position]
        self.inputs.append(DecodeInput(device_slot_of(sequence), token, position))

    def drop_copies(self, blocks: list[int]) -> None:
        """Note that these blocks belong to nobody any more."""
        for block in blocks if self.copies else ():
            self.copies.pop(block, None)

    def free_device_slot(self, slot: int) -> None:
        """Note that a device slot lost its owner, and drop what the draft has for it."""
        self.freed.append(slot)
        self.new_slots = [new for new in self.new_slots if new.slot != slot]
        self.blocks = self.blocks.without(slot)
        self.inputs = [put for put in self.inputs if put.slot != slot]

    def expect(self, sequence: Sequence, block_size: int) -> None:
        """Note that a sequence's blocks wait for another worker's KV."""
        num_tokens = len(sequence.token_ids)
        first = self.layout.job_index(sequence.num_computed_tokens // block_size, num_tokens)
        blocks = self.layout.job_blocks(sequence.tables, num_tokens)
        self.kv.append(Expect(sequence.request_id, first, blocks))

    def export(self, sequence: Sequence, block_size: int) -> None:
        """Note the blocks of a prefill job that the plan makes final, if there are any."""
        computed, first = sequence.num_computed_tokens, sequence.num_exported_blocks
        is_last = computed >= sequence.num_prompt_tokens
        # The last block is final when the prompt ends, full or not.
        final = -(-computed // block_size) if is_last else computed // block_size
        if final > first:
            num_tokens = sequence.num_prompt_tokens
            blocks = self.layout.job_range(sequence.tables, first, final, num_tokens)
            index = self.layout.job_index(first, num_tokens)
            if blocks:
                self.kv.append(Export(sequence.request_id, index, blocks, is_last))
            sequence.num_exported_blocks = final

    def withdraw(self, sequence: Sequence) -> None:
        """Note that a sequence loses the blocks that the KV endpoint knows of."""
        self.kv.append(Withdraw(sequence.request_id))

    def carry_over(self, plan: StepPlan) -> None:
        """Repeat in the next plan the ends that a plan which failed to launch had to report.

        Call it before anything else is noted. Only freed device slots and withdrawn blocks are
        repeated: all sequences of the plan end, or lose what it gave them and are admitted again.
        """
        self.freed = plan.freed
        self.kv = [work for work in plan.kv if isinstance(work, Withdraw)]

    def finish(self, decision: Schedule) -> StepPlan | None:
        """Return a decision's plan, and begin the next one.

        Return None and go on with this one if nothing but freed device slots is to be reported.
        """
        if not (decision.rows or decision.chunks or self.new_slots or self.copies or self.kv):
            return None
        self.number += 1
        plan = StepPlan(
            number=self.number,
            decodes=decision.rows.device_slots,
            chunks=[_chunk_of(chunk) for chunk in decision.chunks],
            freed=self.freed,
            new_slots=self.new_slots,
            blocks=self.blocks,
            copies=[(source, target) for target, source in self.copies.items()],
            inputs=self.inputs,
            kv=self.kv,
            awaits_masks=decision.has_grammar,
        )
        self.freed, self.new_slots, self.blocks = [], [], TableEntries()
        self.copies, self.inputs, self.kv = {}, [], []
        return plan


def _chunk_of(chunk: ScheduledTokens) -> PrefillChunk:
    sequence, start, end = chunk.sequence, chunk.start, chunk.end
    tokens, scored = sequence.token_ids[start:end], []
    if sequence.awaits_scores:
        scored = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)]
    return PrefillChunk(
        device_slot_of(sequence), start, tokens, chunk.samples, scored, sequence.pooling
    )
