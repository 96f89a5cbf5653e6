"""The queue, the running batch and their KV blocks: how sequences enter, end and free blocks.

    waiting ---admitted---> running | reserved ---> ended, or awaiting_send: a prefill job's blocks
     ^   ^                     |         |
     |   +------preempted------+         +--- prompt is computed
     |                                                 |
     +---no room--- children of that sequence: ---fork-+---> running

The changes that follow on the device are collected in the draft of the next plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from pagewire.shared.base.errors import ConfigError, InvalidRequestError, OverloadedError
from pagewire.shared.base.shares import is_within_share
from pagewire.shared.costs.load import Load
from pagewire.shared.costs.step_costs import StepCosts
from pagewire.shared.costs.step_work import StepWork
from pagewire.shared.engine.scheduling.decode_batch import DecodeBatch
from pagewire.shared.engine.scheduling.prompt_queue import PromptQueue
from pagewire.shared.engine.scheduling.schedule import PlanDraft, SchedulerLimits
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.slices import chunk_room
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool
from pagewire.shared.kv.block_table import BlockTable

_BLOCKS_ARE_GOOD = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)


@dataclass(slots=True)
class SequenceTable:
    """The queue, the running batch and the block pool that they share.

    Attributes:
        costs: predicts how long a step takes.
        waiting: the queue. Owners take turns; of each, first those that were preempted. A turn
            lasts as long as a sequence has its device slot.
        running: in the order of their admission.
        reserved: by name; their blocks wait for another worker's KV.
        block_size: tokens of a block.
        awaiting_send: by name; finished prefill jobs whose blocks are still being sent.
        unforked: children whose parents' prompts are not computed yet.
        num_preemptions: how many there were.

    Raises:
        ConfigError: the longest sequence needs more blocks than there are.
    """

    limits: SchedulerLimits
    pool: BlockPool
    hasher: BlockHasher
    costs: StepCosts = field(default_factory=StepCosts)
    waiting: PromptQueue = field(default_factory=PromptQueue)
    running: list[Sequence] = field(default_factory=list)
    reserved: dict[str, Sequence] = field(default_factory=dict)
    awaiting_send: dict[str, Sequence] = field(default_factory=dict)
    unforked: set[Sequence] = field(default_factory=set)
    num_preemptions: int = 0
    block_size: int = field(init=False)
    _free_device_slots: list[int] = field(init=False)
    _decoding: DecodeBatch = field(init=False)
    _draft: PlanDraft = field(init=False)
    _max_blocks: int = field(init=False)  # of a sequence, in one group
    _pinned: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_size = self.hasher.block_size
        self._decoding = DecodeBatch(self.block_size, self.limits.gap_s)
        limits, layout = self.limits, self.pool.layout
        self._max_blocks = layout.blocks_for(limits.max_model_len)
        self._draft = self._new_draft()
        fits = layout.longest_sequence(self.pool.num_blocks, limits.max_num_batched_tokens)
        if limits.max_model_len > fits:
            # Such a sequence would wait for ever for more blocks than there are.
            raise ConfigError(
                f"sequences of {limits.max_model_len} tokens do not fit into "
                f"{self.pool.num_blocks} KV blocks of {self.block_size}: lower --max-model-len or "
                "raise --num-blocks"
            )
        # In a larger batch some sequences would hold blocks and not run.
        num_slots = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        self._free_device_slots = list(range(num_slots - 1, -1, -1))

    def _new_draft(self) -> PlanDraft:
        return PlanDraft(self.pool.layout, self._max_blocks)

    # Requests come and go

    def add(self, sequence: Sequence, children: tuple[Sequence, ...] = ()) -> None:
        """Queue a sequence.

        Args:
            sequence: with nothing computed.
            children: others with the same tokens, which fork from it once these are computed. If
                it ends before that, the first of them takes its place.

        Raises:
            InvalidRequestError: it could never run here.
            OverloadedError: the queue is full, or its owner has too many in it.
        """
        if not 1 <= len(sequence.token_ids) < self.limits.max_model_len:
            raise InvalidRequestError(
                f"a prompt of {len(sequence.token_ids)} tokens does not fit: "
                f"between 1 and {self.limits.max_model_len - 1} are possible here",
                "prompt",
            )
        self._check_room(sequence.spec.owner, 1 + len(children))
        for each in (sequence, *children):
            if not each.prefill_only:  # such a one has nothing to run after its first token
                longest = each.num_prompt_tokens + each.spec.max_tokens
                each.run_until = min(longest, self.limits.max_model_len) - 1
        self.waiting.push(sequence.spec.owner, sequence)
        sequence.children = children
        self.unforked.update(children)

    def _check_room(self, owner: str | None, count: int) -> None:
        waiting, bound = self.num_waiting, self.limits.max_waiting
        if waiting + count <= bound:
            return
        own = self.waiting.num_waiting(owner)
        own += sum(each.spec.owner == owner for each in self.unforked)
        if not is_within_share(bound, own + count, waiting + count):
            raise OverloadedError(f"{waiting} requests are waiting already, {own} of this owner")

    def finish(self, sequence: Sequence, status: RequestStatus) -> None:
        """End a sequence and free what it has, unless its blocks are still to be sent."""
        was = sequence.status
        sequence.transition(status)
        if was is RequestStatus.RUNNING:
            self.running.remove(sequence)
        elif was is RequestStatus.RESERVED:
            del self.reserved[sequence.request_id]
            self._draft.withdraw(sequence)
        elif sequence in self.unforked:
            self.unforked.remove(sequence)
        else:
            self.waiting.remove(sequence.spec.owner, sequence)
        self._pass_on_children(sequence)
        self._give_up_device_slot(sequence)
        if sequence.prefill_only and status in _BLOCKS_ARE_GOOD:
            self.awaiting_send[sequence.request_id] = sequence
        else:
            self._give_up_blocks(sequence)

    def forget(self, request_id: str) -> None:
        """Free the blocks of a finished prefill job; unknown ids are fine."""
        sequence = self.awaiting_send.pop(request_id, None)
        if sequence is not None:
            self._give_up_blocks(sequence)

    def activate(self, sequence: Sequence, first_token: int) -> None:
        """Let a reserved sequence run: its prompt's KV and its first token have arrived."""
        sequence.transition(RequestStatus.RUNNING)
        del self.reserved[sequence.request_id]
        sequence.remote_prefill = False  # if it is preempted, it is computed again here
        sequence.num_computed_tokens = len(sequence.token_ids)
        self.register_blocks(sequence, 0, sequence.num_computed_tokens)
        sequence.token_ids.append(first_token)
        self.running.append(sequence)

    def recompute_locally(self, sequence: Sequence) -> None:
        """Put a reserved sequence back in the queue: its prompt is computed here after all."""
        sequence.transition(RequestStatus.WAITING)
        del self.reserved[sequence.request_id]
        sequence.remote_prefill = False
        self._draft.withdraw(sequence)
        self._give_up_device_slot(sequence)
        self._give_up_blocks(sequence)
        self.waiting.push_first(sequence.spec.owner, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take from a running sequence all that it holds; it waits, first of its owner's."""
        self.running.remove(sequence)
        sequence.transition(RequestStatus.PREEMPTED)
        self.waiting.push_first(sequence.spec.owner, sequence)
        self._give_up_device_slot(sequence)
        self._give_up_blocks(sequence)
        self.num_preemptions += 1

    def fork_children(self, parent: Sequence) -> None:
        """Let the children of a sequence run, whose prompt has been computed.

        They share its full blocks; the last one, if it is partial, is copied by the next plan.
        Those that find no room wait, first of their owner's.
        """
        queued = []
        for child in parent.children:
            if child not in self.unforked:
                continue  # it has ended
            child.scored_until = max(child.scored_until, parent.scored_until)
            # One that awaits scores needs the logits of all its prompt.
            can_fork = not child.awaits_scores and self._covers(parent, child)
            if can_fork and self._free_device_slots and self._has_blocks_to_fork():
                self._run_fork(parent, child)
            else:
                queued.append(child)
            self.unforked.remove(child)
        parent.children = ()
        for child in reversed(queued):
            self.waiting.push_first(child.spec.owner, child)

    def _has_blocks_to_fork(self) -> bool:
        """Whether each group has a block to spare for the copy of a partial block."""
        return self.pool.num_available >= len(self.pool.layout.groups)

    def _covers(self, parent: Sequence, child: Sequence) -> bool:
        """Whether a parent, which may be longer, still has all blocks that a child reads."""
        firsts = self.pool.layout.first_blocks(len(child.token_ids))
        return all(t.first <= first for t, first in zip(parent.tables, firsts, strict=True))

    def _pass_on_children(self, parent: Sequence) -> None:
        """Queue the first child of a sequence that ends before it could fork, with the others."""
        children = [child for child in parent.children if child in self.unforked]
        parent.children = ()
        if children:
            heir, *others = children
            heir.children = tuple(others)
            self.unforked.remove(heir)
            self.waiting.push_first(heir.spec.owner, heir)

    def _run_fork(self, parent: Sequence, child: Sequence) -> None:
        known = len(child.token_ids) - 1  # the newest token runs again: it is sampled from
        num_shared = known // self.block_size
        num_blocks = self._blocks_for(known)
        child.tables, copies = self.pool.fork(parent.tables, num_blocks, num_shared)
        self._draft.copies.update((target, source) for source, target in copies)
        child.block_hashes = parent.block_hashes[:num_shared]
        child.num_computed_tokens = child.num_cached_tokens = known
        child.remote_prefill = False  # if it is preempted, it is computed again here
        child.strikes = 0  # its parent has the same prompt, and stays suspected
        self._take_device_slot(child)
        child.transition(RequestStatus.RUNNING)
        self.running.append(child)

    def pin(self, blocks: list[int]) -> None:
        """Keep blocks from being given to others while something still writes to them."""
        self.pool.acquire(blocks)
        self._pinned.append(blocks)

    def unpin(self, blocks: list[int]) -> None:
        """Release blocks that were pinned together: nothing writes to them any more."""
        self._pinned.remove(blocks)
        self.pool.release(blocks)

    # What a sequence holds

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _usable_prefix(self, sequence: Sequence) -> list[BlockTable]:
        """Return the cached blocks of a sequence, without its last token: that must be computed."""
        is_whole = sequence.awaits_scores or sequence.pooling is not None
        if not self.pool.enable_caching or is_whole:
            return [BlockTable() for _ in range(len(self.pool.layout.groups))]
        sequence.extend_hashes(self.hasher)
        most = (len(sequence.token_ids) - 1) // self.block_size
        return self.pool.lookup(sequence.block_hashes[:most])

    def _take_device_slot(self, sequence: Sequence) -> None:
        sequence.device_slot = self._free_device_slots.pop()
        self._draft.add_device_slot(sequence)
        self.waiting.begin_turn(sequence.spec.owner)

    def _give_up_device_slot(self, sequence: Sequence) -> None:
        sequence.num_late_tokens = sequence.num_in_flight_tokens
        sequence.decodes_from_device = False
        self._decoding.leave(sequence)
        if sequence.device_slot is not None:
            self._free_device_slots.append(sequence.device_slot)
            self._draft.free_device_slot(sequence.device_slot)
            sequence.device_slot = None
            self.waiting.end_turn(sequence.spec.owner)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        if sequence.num_exported_blocks:
            self._draft.withdraw(sequence)
        try:
            self._keep_output(sequence)
            self._retain(sequence)
        finally:
            for table in sequence.tables:
                self._draft.drop_copies(table.held)
                self.pool.release(table.held)
            sequence.tables = []
            sequence.num_computed_tokens = 0
            sequence.num_exported_blocks = 0

    def _keep_output(self, sequence: Sequence) -> None:
        """Make the full blocks of a sequence's output findable before it gives them up.

        Now, and not block by block as the answer grows: many are hashed more quickly at once.
        """
        if sequence.has_known_token and sequence.status is not RequestStatus.FINISHED_ERROR:
            # The newest token has not run.
            self.register_blocks(sequence, 0, len(sequence.token_ids) - 1)
        sequence.has_known_token = False

    def _retain(self, sequence: Sequence) -> None:
        """Have a sequence that has ended retain its blocks, if its session is to go on."""
        seconds, status = sequence.spec.retain_s, sequence.status
        if seconds and status.is_finished and status is not RequestStatus.FINISHED_ERROR:
            self.pool.retain(sequence.spec.owner, sequence.block_hashes, seconds)

    def holders(self) -> Iterable[Sequence]:
        """All sequences that may hold blocks."""
        return [*self.running, *self.reserved.values(), *self.awaiting_send.values(), *self.waiting]

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks: those in the queue, and children that have not forked."""
        return len(self.waiting) + len(self.unforked)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that wait to be prefilled, here and in the running batch's chunks."""
        return self.waiting.num_tokens + sum(each.num_uncomputed_tokens for each in self._chunked())

    @property
    def queued_s(self) -> float:
        """Seconds in which the prompts that wait here are computed, next to the decode rows of now.

        As if nothing of those were cached that have no blocks yet. Those that other workers compute
        do not count.
        """
        work = self.waiting.work
        for each in self._chunked():
            work = work.with_chunk(each.num_computed_tokens, each.num_uncomputed_tokens)
        if not work.tokens:
            return 0.0
        return self.costs.prices.prompts_s(work.tokens, work.products, self.room, self._row_work)

    @property
    def room(self) -> int:
        """Prompt tokens that a step has room for, next to the decode rows of now."""
        rows = self._row_work
        room = chunk_room(self.limits, self.costs, self._decoding.gap_s, rows, 0)
        return max(1, min(room, self.limits.max_num_batched_tokens - rows.rows))

    @property
    def _row_work(self) -> StepWork:
        return StepWork(len(self._decoding), self._decoding.contexts)

    @property
    def load(self) -> Load:
        """How busy the engine is. Answers count as rows from the computing of their prompts on."""
        prompts = [each for each in self._chunked() if not each.prefill_only]
        return Load(
            blocks=self.pool.counts().used,
            tokens=self.num_queued_tokens,
            seconds=self.queued_s,
            rows=len(self._decoding) + len(self.reserved) + len(prompts),
            room=self.room,
        )

    def _chunked(self) -> list[Sequence]:
        """Return the running sequences whose prompts are not computed yet."""
        if len(self._decoding) == len(self.running):
            return []
        return [sequence for sequence in self.running if not sequence.decodes_from_device]

    def check_integrity(self) -> None:
        """Check that the pool's accounting agrees with what the sequences hold.

        Raises:
            IntegrityError: they do not.
        """
        references = Counter(chain.from_iterable(self._pinned))
        for sequence in self.holders():
            references.update(chain.from_iterable(table.held for table in sequence.tables))
        self.pool.check_integrity(references)

    def note_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that the KV of tokens `start .. end - 1` is written: the blocks can be found.

        Those that no later token reads are given up: from now on they are cached, or free.
        """
        self.register_blocks(sequence, start, end)
        if self.pool.layout.has_windows:
            self._drop_unread(sequence, end)

    def register_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the blocks that tokens `start .. end - 1` filled findable: their KV is written."""
        size = self.block_size
        if start // size == end // size or not self.pool.enable_caching:
            return
        if sequence.pooling is not None:
            return
        sequence.extend_hashes(self.hasher)
        full = min(end // size, len(sequence.block_hashes))
        self.pool.register(sequence.tables, sequence.block_hashes, start // size, full)

    def _drop_unread(self, sequence: Sequence, num_tokens: int) -> None:
        """Give up the blocks that are not read after `num_tokens` tokens."""
        firsts = self.pool.layout.first_blocks(num_tokens)
        for table, first in zip(sequence.tables, firsts, strict=True):
            if first > table.first:
                self.pool.release(table.drop_before(first))
