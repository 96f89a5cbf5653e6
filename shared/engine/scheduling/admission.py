"""Decides whether the first sequence of the queue has room to run, and how many blocks it gets."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.shared.engine.scheduling.schedule import Schedule
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.sequence_table import SequenceTable
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.engine.scheduling.suspects import Suspects
from pagewire.shared.kv.block_table import BlockTable


@dataclass(slots=True)
class Admission:
    """Lets waiting sequences in, first ones first, as long as there is room.

    Attributes:
        table: the queue, and what runs.
        suspects: the suspected sequences, of which at most one is admitted.
    """

    table: SequenceTable
    suspects: Suspects

    def admit(self, decision: Schedule, *, is_full: bool = False) -> Sequence | None:
        """Give the first in the queue its blocks and a device slot, if there are enough of both.

        If there are not, a running sequence may be preempted for it.

        Args:
            decision: the step so far, in which the changes are noted.
            is_full: the step can compute nothing more. Then the first sequence whose prompt a
                prefill worker computes is admitted, since that worker can begin now. If it is not
                the first of the queue, it leaves what that one needs, and its owner takes no more
                than an equal share of the device slots.

        Returns:
            The sequence, which runs or is reserved; None if none could be admitted.
        """
        table, blocks, limits = self.table, self.table.blocks, self.table.limits
        queue = table.waiting.remote() if is_full else table.waiting
        if (sequence := self.suspects.first_of(queue)) is None:
            return None
        if sequence.num_late_tokens > 0:
            return None  # it was preempted while a step ran; that step's token is not known yet
        first = next(iter(table.waiting))
        passes = is_full and sequence is not first
        if passes and not self._may_take_slot(sequence.spec.owner):
            return None
        if not table.free_slots:
            self._make_way(sequence, 0, decision)
            return None
        if sequence.remote_prefill and table.draft.copies:
            return None  # arriving KV could overwrite a block that this plan still copies from
        decision.touched.append(sequence)
        tables = blocks.find_prefix(sequence)
        num_cached = len(tables[0]) * blocks.size
        is_remote = sequence.remote_prefill and (
            len(sequence.token_ids) - num_cached > self._local_tokens(sequence)
        )
        if is_full and not is_remote:
            return None  # most of it is cached: it would be computed here, before the first ones
        missing, later = self._count_blocks(sequence, tables, is_remote)
        reserve = limits.watermark_blocks if table.running or table.reserved else 0
        pool, cached = blocks.pool, [block for each in tables for block in each.held]
        if passes:
            reserve += pool.layout.blocks_for(len(first.token_ids)) * len(pool.layout.groups)
        if sum(missing) + later + reserve > pool.num_available - pool.num_evictable(cached):
            if not passes:
                self._make_way(sequence, sum(missing) + later, decision)
            return None
        pool.acquire(cached)
        sequence.remote_prefill, sequence.num_computed_tokens = is_remote, num_cached
        self._take_in(sequence, tables, missing, decision)
        return sequence

    def _may_take_slot(self, owner: str | None) -> bool:
        """Whether an owner may take a device slot before the first of the queue has one."""
        table = self.table
        num_slots = len(table.free_slots) + len(table.running) + len(table.reserved)
        return len(table.free_slots) > 1 and table.waiting.has_share_left(owner, num_slots)

    def _take_in(
        self, sequence: Sequence, tables: list[BlockTable], missing: list[int], decision: Schedule
    ) -> None:
        """Give a sequence its tables, the blocks that they lack, and a device slot."""
        sequence.tables = tables  # before anything can fail, so that they are released in any case
        for each, count in zip(tables, missing, strict=True):
            each.block_ids += self.table.blocks.pool.allocate(count)
        self.suspects.admit(sequence)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            decision.admitted.append(sequence)
        self.table.admit(sequence)
        if sequence.status is RequestStatus.RESERVED:
            decision.reserved.append(sequence)

    def _local_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens are computed here rather than by a prefill worker."""
        wanted = sequence.local_prefill_tokens
        return self.table.limits.local_prefill_tokens if wanted is None else wanted

    def _count_blocks(
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
        blocks = self.table.blocks
        layout, num_tokens = blocks.pool.layout, len(sequence.token_ids)
        needed, num_cached = layout.blocks_for(num_tokens), len(tables[0])
        chunk = num_cached * blocks.size + self.table.limits.max_num_batched_tokens
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

    def _make_way(self, sequence: Sequence, num_blocks: int, decision: Schedule) -> None:
        """Preempt a sequence of the owner that has most, for the first one of another owner.

        The next step admits that one, if it lacks at most half of all blocks.
        """
        table = self.table
        turns = table.waiting.num_turns
        if turns(sequence.spec.owner) or 2 * num_blocks > table.blocks.pool.num_blocks:
            return
        victims = [each for each in reversed(table.running) if not each.prefill_only]
        victim = max(victims, key=lambda each: turns(each.spec.owner), default=None)
        if victim is not None and turns(victim.spec.owner) > 1:
            decision.add_preempted(victim)
            table.preempt(victim)
