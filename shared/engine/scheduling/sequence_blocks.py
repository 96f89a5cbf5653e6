"""The KV blocks of an engine's sequences: how they get, share, keep and give up blocks.

What follows for the device's block tables is collected in the draft of the next plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from pagewire.shared.engine.scheduling.schedule import PlanDraft
from pagewire.shared.engine.scheduling.sequence import Sequence, device_slot_of
from pagewire.shared.engine.scheduling.status import RequestStatus
from pagewire.shared.kv.block_hash import BlockHasher
from pagewire.shared.kv.block_pool import BlockPool
from pagewire.shared.kv.block_table import BlockTable


@dataclass(slots=True)
class SequenceBlocks:
    """Gives blocks to sequences, and makes those with computed tokens findable.

    Attributes:
        pool: has all blocks, and the prefix cache.
        hasher: hashes full blocks, so that the prefix cache finds them.
        draft: the next plan so far.
        size: tokens of a block.
    """

    pool: BlockPool
    hasher: BlockHasher
    draft: PlanDraft
    size: int = field(init=False)
    _pinned: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.hasher.block_size

    # A sequence gets blocks

    def find_prefix(self, sequence: Sequence) -> list[BlockTable]:
        """Return the cached blocks of a sequence, without its last token: that must be computed."""
        is_whole = sequence.awaits_scores or sequence.pooling is not None
        if not self.pool.enable_caching or is_whole:
            return [BlockTable() for _ in range(len(self.pool.layout.groups))]
        sequence.extend_hashes(self.hasher)
        most = (len(sequence.token_ids) - 1) // self.size
        return self.pool.lookup(sequence.block_hashes[:most])

    def count_cached(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence are cached, its last one not among them."""
        return len(self.find_prefix(sequence)[0]) * self.size

    def count_missing(self, sequence: Sequence, end: int) -> int:
        """Return how many blocks a sequence lacks for the tokens before `end`, in all groups."""
        needed = -(-end // self.size)
        return sum(max(0, needed - len(table)) for table in sequence.tables)

    def extend(self, sequence: Sequence, end: int) -> None:
        """Give a sequence the blocks that it lacks for the tokens before `end`."""
        slot, needed = device_slot_of(sequence), -(-end // self.size)
        for group, table in enumerate(sequence.tables):
            first = len(table)
            if first < needed:
                table.block_ids += self.pool.allocate(needed - first)
                self.draft.add_entries(slot, group, table, first)

    def extend_each(self, sequences: list[Sequence]) -> bool:
        """Give each sequence one more block in each group; return False if there are too few."""
        num_groups = len(self.pool.layout.groups)
        if len(sequences) * num_groups > self.pool.num_available:
            return False
        slots, entries = [device_slot_of(sequence) for sequence in sequences], self.draft.blocks
        for group in range(num_groups):
            tables = [sequence.tables[group] for sequence in sequences]
            blocks, before = self.pool.allocate(len(sequences)), group * self.draft.max_blocks
            entries.slots.extend(slots)
            entries.positions.extend([before + len(table) for table in tables])
            entries.block_ids.extend(blocks)
            for table, block in zip(tables, blocks, strict=True):
                table.block_ids.append(block)
        return True

    def can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Whether a child can share its parent's blocks.

        The parent, which may be longer, must still have all blocks that the child reads, and each
        group must have one to spare for the copy of a partial block.
        """
        layout = self.pool.layout
        if self.pool.num_available < len(layout.groups):
            return False
        firsts = layout.first_blocks(len(child.token_ids))
        return all(t.first <= first for t, first in zip(parent.tables, firsts, strict=True))

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a child share the full blocks of `num_tokens` tokens; the next plan copies the last.

        Args:
            parent: has computed these tokens.
            child: has no blocks.
            num_tokens: with which both begin.
        """
        num_shared = num_tokens // self.size
        num_blocks = -(-num_tokens // self.size)
        child.tables, copies = self.pool.fork(parent.tables, num_blocks, num_shared)
        self.draft.copies.update((target, source) for source, target in copies)
        child.block_hashes = parent.block_hashes[:num_shared]
        child.num_computed_tokens = child.num_cached_tokens = num_tokens

    # Its blocks can be found

    def record_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that the KV of tokens `start .. end - 1` is written: the blocks can be found.

        Those that no later token reads are given up: from now on they are cached, or free.
        """
        self.register(sequence, start, end)
        if self.pool.layout.has_windows:
            self.drop_unread(sequence, end)

    def register(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the blocks that tokens `start .. end - 1` filled findable: their KV is written."""
        if start // self.size == end // self.size or not self.pool.enable_caching:
            return
        if sequence.pooling is not None:
            return
        sequence.extend_hashes(self.hasher)
        full = min(end // self.size, len(sequence.block_hashes))
        self.pool.register(sequence.tables, sequence.block_hashes, start // self.size, full)

    # It gives them up

    def drop_unread(self, sequence: Sequence, num_tokens: int) -> None:
        """Give up the blocks that are not read after `num_tokens` tokens."""
        firsts = self.pool.layout.first_blocks(num_tokens)
        for table, first in zip(sequence.tables, firsts, strict=True):
            if first > table.first:
                self.pool.release(table.drop_before(first))

    def give_up(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; they stay in the prefix cache as far as possible."""
        if sequence.num_exported_blocks:
            self.draft.withdraw(sequence)
        try:
            self._keep_output(sequence)
            self._retain(sequence)
        finally:
            for table in sequence.tables:
                self.draft.drop_copies(table.held)
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
            self.register(sequence, 0, len(sequence.token_ids) - 1)
        sequence.has_known_token = False

    def _retain(self, sequence: Sequence) -> None:
        """Have a sequence that has ended retain its blocks, if its session is to go on."""
        seconds, status = sequence.spec.retain_s, sequence.status
        if seconds and status.is_finished and status is not RequestStatus.FINISHED_ERROR:
            self.pool.retain(sequence.spec.owner, sequence.block_hashes, seconds)

    # Blocks that something else uses

    def pin(self, blocks: list[int]) -> None:
        """Keep blocks from being given to others while something still writes to them."""
        self.pool.acquire(blocks)
        self._pinned.append(blocks)

    def unpin(self, blocks: list[int]) -> None:
        """Release blocks that were pinned together: nothing writes to them any more."""
        self._pinned.remove(blocks)
        self.pool.release(blocks)

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Check that the pool's accounting agrees with what sequences hold.

        Args:
            holders: all sequences that may hold blocks.

        Raises:
            IntegrityError: it does not.
        """
        references = Counter(chain.from_iterable(self._pinned))
        for sequence in holders:
            references.update(chain.from_iterable(table.held for table in sequence.tables))
        self.pool.check_integrity(references)
