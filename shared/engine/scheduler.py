"""Which tokens the next step runs: continuous batching with chunked prefill.

Pure: no clocks, sockets or kernels, and it calls nobody: what it decides is returned.

Sequences wait in arrival order, run in a batch, and end. A step is scheduled before the tokens of
the step before it are known, so a running sequence may have one token in flight: its value is on
the device, its place is accounted for here. What the scheduler decides it also books: blocks are
taken, `num_computed_tokens` counts what the step will have computed.

When blocks run out, the youngest running sequence is preempted: it gives up all its blocks and
waits, first in the queue, to be computed again.

A decode row costs one comparison and one addition: `Sequence.decode_until` says up to where no
block is missing and the end is not reached.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagewire.shared.engine.schedule import (
    PlanDraft,
    Schedule,
    ScheduledTokens,
    SchedulerLimits,
)
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.errors import (
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    SchedulingError,
)
from pagewire.shared.kv_cache.block_hash import BlockHasher
from pagewire.shared.kv_cache.block_pool import BlockPool
from pagewire.shared.request import RequestStatus

_BLOCKS_ARE_GOOD = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)


@dataclass(slots=True)
class Scheduler:
    """The queue, the running batch and the block pool that they share.

    Raises:
        ConfigError: the longest sequence needs more blocks than there are.
    """

    limits: SchedulerLimits
    pool: BlockPool
    hasher: BlockHasher
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    reserved: dict[str, Sequence] = field(default_factory=dict)
    held: dict[str, Sequence] = field(default_factory=dict)
    _free_slots: list[int] = field(init=False)
    num_preemptions: int = 0
    _num_plans: int = 0
    _draft: PlanDraft = field(default_factory=PlanDraft)
    _pinned: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        longest, pool_tokens = self.limits.max_model_len, self.pool.num_blocks * self._block_size
        if longest > pool_tokens:
            # Such a sequence would wait for ever for more blocks than there are.
            raise ConfigError(
                f"sequences of {longest} tokens do not fit into {self.pool.num_blocks} KV blocks "
                f"of {self._block_size}: lower --max-model-len or raise --num-blocks"
            )
        self._free_slots = list(range(self.limits.max_num_seqs - 1, -1, -1))

    @property
    def _block_size(self) -> int:
        return self.hasher.block_size

    # Requests come and go

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            InvalidRequestError: it could never run here.
            OverloadedError: the queue is full.
        """
        if not 1 <= len(sequence.token_ids) < self.limits.max_model_len:
            raise InvalidRequestError(
                f"a prompt of {len(sequence.token_ids)} tokens does not fit: "
                f"between 1 and {self.limits.max_model_len - 1} are possible here",
                "prompt",
            )
        if len(self.waiting) >= self.limits.max_waiting:
            raise OverloadedError(f"{len(self.waiting)} requests are waiting already")
        if not sequence.prefill_only:  # such a one has nothing to run after its first token
            longest = sequence.num_prompt_tokens + sequence.sampling.max_tokens
            sequence.run_until = min(longest, self.limits.max_model_len) - 1
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, status: RequestStatus) -> None:
        """End a sequence and free what it has, unless its blocks are to be held for sending."""
        was = sequence.status
        sequence.transition(status)
        if was is RequestStatus.RUNNING:
            self.running.remove(sequence)
        elif was is RequestStatus.RESERVED:
            del self.reserved[sequence.request_id]
            self._draft.withdraw(sequence)
        else:
            self.waiting.remove(sequence)
        self._give_up_slot(sequence)
        if sequence.prefill_only and status in _BLOCKS_ARE_GOOD:
            self.held[sequence.request_id] = sequence
        else:
            self._give_up_blocks(sequence)

    def forget(self, request_id: str) -> None:
        """Free the blocks of a finished prefill job; unknown ids are fine."""
        sequence = self.held.pop(request_id, None)
        if sequence is not None:
            self._give_up_blocks(sequence)

    def activate(self, sequence: Sequence, first_token: int) -> None:
        """Let a reserved sequence run: its prompt's KV has arrived, its first token is known."""
        sequence.transition(RequestStatus.RUNNING)
        del self.reserved[sequence.request_id]
        sequence.remote_prefill = False  # if it is preempted, it is computed again here
        sequence.num_computed_tokens = len(sequence.token_ids)
        self.register_blocks(sequence, 0, sequence.num_computed_tokens)
        sequence.token_ids.append(first_token)
        self.running.append(sequence)

    def fall_back(self, sequence: Sequence) -> None:
        """Compute a reserved sequence's prompt here after all: first in the queue."""
        sequence.transition(RequestStatus.WAITING)
        del self.reserved[sequence.request_id]
        sequence.remote_prefill = False
        self._draft.withdraw(sequence)
        self._give_up_slot(sequence)
        self._give_up_blocks(sequence)
        self.waiting.appendleft(sequence)

    def pin(self, blocks: list[int]) -> None:
        """Keep blocks from being given to others while something still writes to them."""
        self.pool.acquire(blocks)
        self._pinned.update(blocks)

    def unpin(self, blocks: list[int]) -> None:
        """Nothing writes to these blocks any more."""
        self._pinned.subtract(blocks)
        self._pinned += Counter()  # drops what is not pinned at all
        self.pool.release(blocks)

    # One step

    def schedule(self) -> Schedule:
        """Choose and book the next step.

        Raises:
            SchedulingError: something failed; names the sequences that had been changed.
        """
        decision = Schedule()
        try:
            self._decide(decision)
        except Exception as exc:
            names = [sequence.request_id for sequence in decision.touched]
            raise SchedulingError(names) from exc
        return decision

    def take_back(self, decision: Schedule) -> None:
        """Report with the next plan what a plan that was not launched had to report."""
        if decision.plan is not None:
            self._draft.take_back(decision.plan)

    def _decide(self, decision: Schedule) -> None:
        prefilling = self._choose_rows(decision)
        budget = self.limits.max_num_batched_tokens - len(decision.rows)
        for sequence in prefilling:
            if budget == 0:
                break
            if sequence.status is RequestStatus.RUNNING:
                budget -= self._add_tokens(sequence, budget, decision)
        if decision.preempted:
            decision.drop_preempted()
        else:
            self._admit_waiting(budget, decision)
        self._book(decision)
        decision.plan = self._draft.plan(self._num_plans + 1, decision)
        if decision.plan is not None:
            self._num_plans += 1
            self._draft = PlanDraft()

    def _choose_rows(self, decision: Schedule) -> list[Sequence]:
        """Choose decode rows, as many as may run; returns the sequences that have more to run.

        Rows come before chunks: a long prompt does not hold up the answers under way.
        """
        rows: list[Sequence] = []
        growing: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if sequence.num_computed_tokens < sequence.decode_until:
                rows.append(sequence)
            elif sequence.decodes_from_slot:
                if sequence.num_computed_tokens < sequence.run_until:
                    rows.append(sequence)
                    growing.append(sequence)
            elif sequence.num_uncomputed_tokens == 1:
                rows.append(sequence)
                growing.append(sequence)
            else:
                prefilling.append(sequence)
        limit = self.limits.max_num_batched_tokens
        if len(rows) > limit:
            del rows[limit:]
            chosen = set(rows)
            growing = [sequence for sequence in growing if sequence in chosen]
        decision.rows = rows
        for sequence in growing:
            if sequence.status is RequestStatus.RUNNING:
                self._prepare_row(sequence, decision)
        return prefilling

    def _prepare_row(self, sequence: Sequence, decision: Schedule) -> None:
        """Take the block that a decode row needs, and bring its token if the slot lacks it."""
        start = sequence.num_computed_tokens
        if not self._grow(sequence, start + 1, decision):
            return
        if not sequence.decodes_from_slot:
            self._draft.put_input(sequence, start)
            decision.entries.append(ScheduledTokens(sequence, start, start + 1, samples=True))

    def _add_tokens(self, sequence: Sequence, budget: int, decision: Schedule) -> int:
        """Add what a sequence has to run, within the budget; returns the number of tokens."""
        missing = sequence.num_uncomputed_tokens
        if missing == 1:
            decision.rows.append(sequence)
            self._prepare_row(sequence, decision)
            return 1
        start = sequence.num_computed_tokens
        end = start + min(missing, budget)
        if not self._grow(sequence, end, decision):
            return 0
        is_all = end == len(sequence.token_ids)
        decision.chunks.append(ScheduledTokens(sequence, start, end, samples=is_all))
        return end - start

    def _grow(self, sequence: Sequence, end: int, decision: Schedule) -> bool:
        """Take the blocks for the tokens before `end`, preempting younger sequences for them.

        Returns:
            Whether it has them; otherwise it was preempted itself.
        """
        decision.touched.append(sequence)
        while (missing := self._blocks_for(end) - len(sequence.block_ids)) > 0:
            if missing <= self.pool.num_available:
                self._take_blocks(sequence, missing)
                break
            if self._preempt_youngest(decision) is sequence:
                return False
        return True

    def _take_blocks(self, sequence: Sequence, count: int) -> None:
        sequence.block_ids += self.pool.allocate(count)
        self._draft.add_blocks(sequence, len(sequence.block_ids) - count)
        self._note_room(sequence)

    def _note_room(self, sequence: Sequence) -> None:
        """Note up to where a sequence decodes in the blocks that it has."""
        if sequence.decodes_from_slot:
            capacity = len(sequence.block_ids) * self._block_size
            sequence.decode_until = min(capacity, sequence.run_until)

    def _book(self, decision: Schedule) -> None:
        for sequence in decision.rows:
            sequence.num_computed_tokens += 1
        for part in (*decision.entries, *decision.chunks):
            sequence = part.sequence
            sequence.num_computed_tokens = part.end
            if part.samples:
                sequence.decodes_from_slot = True
                self._note_room(sequence)
            if sequence.prefill_only:
                self._draft.export(sequence, self._block_size)

    def register_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the blocks that tokens `start .. end - 1` filled findable: their KV is written."""
        size = self._block_size
        if start // size == end // size or not self.pool.enable_caching:
            return
        sequence.extend_hashes(self.hasher)
        full = min(end // size, len(sequence.block_hashes))
        self.pool.register(sequence.block_ids, sequence.block_hashes, start // size, full)

    # Admission and preemption

    def _admit_waiting(self, budget: int, decision: Schedule) -> None:
        """Admit from the queue while there is room."""
        while budget > 0 and (admitted := self._admit(decision)) is not None:
            if admitted.status is RequestStatus.RUNNING:
                budget -= self._add_tokens(admitted, budget, decision)

    def _admit(self, decision: Schedule) -> Sequence | None:
        """Give the first in the queue its blocks and a slot, if there are enough of both."""
        if not self.waiting or not self._free_slots:
            return None
        sequence = self.waiting[0]
        if sequence.num_late_tokens > 0:
            return None  # preempted in mid-step; its newest token is known a step later
        decision.touched.append(sequence)
        cached = self._usable_prefix(sequence)
        missing = self._blocks_for(len(sequence.token_ids)) - len(cached)
        reserve = self.limits.watermark_blocks if self.running or self.reserved else 0
        if missing + reserve > self.pool.num_available - self.pool.num_evictable(cached):
            return None
        self.pool.acquire(cached)
        sequence.block_ids = cached  # now, so that they are given back whatever happens
        sequence.block_ids = [*cached, *self.pool.allocate(missing)]
        self.waiting.popleft()
        sequence.num_computed_tokens = len(cached) * self._block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            decision.admitted.append(sequence)
        sequence.slot = self._free_slots.pop()
        self._draft.add_slot(sequence)
        self._let_run_or_reserve(sequence, decision)
        return sequence

    def _let_run_or_reserve(self, sequence: Sequence, decision: Schedule) -> None:
        if sequence.num_uncomputed_tokens <= self.limits.local_prefill_tokens:
            sequence.remote_prefill = False
        if not sequence.remote_prefill:
            sequence.transition(RequestStatus.RUNNING)
            self.running.append(sequence)
            return
        sequence.transition(RequestStatus.RESERVED)
        self.reserved[sequence.request_id] = sequence
        decision.reserved.append(sequence)
        self._draft.expect(sequence, self._block_size)

    def _usable_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of a sequence, at least one token short of all it has."""
        if not self.pool.enable_caching:
            return []
        sequence.extend_hashes(self.hasher)
        most = (len(sequence.token_ids) - 1) // self._block_size
        return self.pool.lookup(sequence.block_hashes[:most])

    def _preempt_youngest(self, decision: Schedule) -> Sequence:
        victim = self.running.pop()
        decision.touched.append(victim)
        decision.preempted.append(victim)
        victim.transition(RequestStatus.PREEMPTED)
        self._give_up_slot(victim)
        self._give_up_blocks(victim)
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    # What a sequence holds

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _give_up_slot(self, sequence: Sequence) -> None:
        sequence.num_late_tokens = sequence.num_in_flight_tokens
        sequence.decodes_from_slot = False
        sequence.decode_until = 0
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            self._draft.free_slot(sequence.slot)
            sequence.slot = None

    def _give_up_blocks(self, sequence: Sequence) -> None:
        if sequence.num_exported_blocks:
            self._draft.withdraw(sequence)
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_exported_blocks = 0

    def holders(self) -> Iterable[Sequence]:
        """All sequences that may hold blocks."""
        return [*self.running, *self.reserved.values(), *self.held.values(), *self.waiting]

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that wait to be prefilled, here and in the running batch's chunks."""
        waiting = sum(len(sequence.token_ids) for sequence in self.waiting)
        chunked = [sequence for sequence in self.running if not sequence.decodes_from_slot]
        return waiting + sum(sequence.num_uncomputed_tokens for sequence in chunked)

    def check_integrity(self) -> None:
        """Check that the pool's books agree with what the sequences hold.

        Raises:
            IntegrityError: they do not.
        """
        references = Counter(self._pinned)
        for sequence in self.holders():
            references.update(sequence.block_ids)
        self.pool.check_integrity(references)
