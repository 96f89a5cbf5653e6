"""An executor without a model, which detects every wrong read of the paged cache.

Its "KV" of a position is the token that was run there; the next token is a function of the seed
and of all the tokens that the block table leads to. So a sequence ends with the right tokens only
if every block held what it should whenever it was read.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from pagewire.kernels.kv_staging import make_copy_list
from pagewire.kernels.reference.kv_pack import pack_blocks, unpack_blocks
from pagewire.shared.engine.execution.block_mover import BlockMove, PendingCheck
from pagewire.shared.engine.scheduling.schedule import SchedulerLimits
from pagewire.shared.engine.scheduling.sequence import Sequence
from pagewire.shared.engine.scheduling.step import (
    Expect,
    Export,
    GrammarMasks,
    NewDeviceSlot,
    PrefillChunk,
    StepPlan,
    StepResult,
    StepScores,
)
from pagewire.shared.kv.block_table import NO_BLOCK
from pagewire.shared.kv.kv_layout import CachedToken, KvLayout
from pagewire.shared.request.logprobs import Logprobs

VOCAB = 7
NUM_GROUPS = 2  # layer groups of a block; here each is a part of its tokens, not of its layers


def fake_layout(block_size: int) -> KvLayout:
    """Return the layout that the fake KV has for an endpoint: a token takes four bytes."""
    return KvLayout.of([None] * NUM_GROUPS, CachedToken(1, 1, 1), block_size, "float16")


def next_token(seed: int, tokens: list[int]) -> int:
    """Return the token that the fake model samples after these tokens; `seed` is below 256."""
    return zlib.crc32(bytes([seed, *tokens])) % VOCAB


def score(tokens: list[int]) -> Logprobs:
    """Return the fake model's log probabilities of these tokens, without alternatives."""
    ids = np.array(tokens, np.int32)
    return Logprobs(1, ids.tobytes(), (-ids - 0.5).astype(np.float32).tobytes(), ids.tobytes())


def pooled_prompt(tokens: list[int]) -> bytes:
    """Return the fake model's embedding of a prompt, before it is normalised."""
    return np.array([len(tokens), *np.bincount(tokens, minlength=8)[:8]], np.float32).tobytes()


class FakePending:
    """Results of a launched step, or its error."""

    def __init__(
        self, device: FakeDevice, result: StepResult, error: Exception | None = None
    ) -> None:
        self.result = result
        self._device = device
        self._error = error

    def is_done(self) -> bool:
        return self._device.has_run

    def wait(self) -> StepResult:
        if self._error is not None:
            raise self._error
        assert self._device.awaiting is not self, "no masks came"
        return self.result


class FakeMove(PendingCheck):
    """A move that runs when `poll` is called, after all moves that were launched before it."""

    def __init__(self, device: FakeDevice, work: Callable[[], object]) -> None:
        self.corrupt = torch.zeros((), dtype=torch.int64)
        super().__init__(self.corrupt, None)
        self.work, self.has_run = work, False
        self._device = device

    def poll(self) -> bool:
        if self._device.has_moved:
            self._device.run_moves()
        return self.has_run


@dataclass
class FakeSlot:
    """The state of a device slot.

    Attributes:
        token, position: input of the next decode row, if a step has left one.
        computed: tokens that have run in it.
        scores: whether log probabilities of its tokens are requested.
    """

    seed: int
    scores: bool = False
    tables: list[list[int]] = field(default_factory=list)  # of each cache group
    token: int | None = None
    position: int = 0
    computed: int | None = None


@dataclass
class FakeDevice:
    """Runs plans in the order in which they are launched, and checks each.

    Moves run as late as possible: when somebody asks whether they are done. Those that are launched
    while `has_moved` is false run later, on blocks and staging slots that may have other owners by
    then.

    Attributes:
        cells: [block][offset], the token that was run there.
        batches: (tokens, rows and chunks) of every step.
        num_decode_rows: of all steps together.
        longest_table: largest number of blocks of a device slot in any step.
        prepared: device slots that were loaded before they ran.
        new_slots: each device slot that was loaded, in order.
        replays: whether steps are CUDA graph replays, of which only the end is visible.
        moved: for each packing: blocks, layer groups, and number of the plan that it waited for.
        has_run: whether the device has finished its steps.
        has_moved: whether the device has finished packing and unpacking.
        fail_execute, fail_wait: raised by the next step.
        fails_to_move: raised by the next packing or unpacking.
        moves: those that have not run yet.
        awaiting: the step that waits for its masks.
    """

    limits: SchedulerLimits
    num_blocks: int
    layout: KvLayout
    block_size: int = field(init=False)
    cells: list[list[int | None]] = field(init=False)
    batches: list[tuple[int, int]] = field(default_factory=list)
    num_decode_rows: int = 0
    longest_table: int = 0
    prepared: list[int] = field(default_factory=list)
    new_slots: list[NewDeviceSlot] = field(default_factory=list)
    replays: bool = False
    moved: list[tuple[list[int], range, int]] = field(default_factory=list)
    has_run: bool = True
    has_moved: bool = True
    fail_execute: Exception | None = None
    fail_wait: Exception | None = None
    fails_to_move: Exception | None = None
    moves: deque[FakeMove] = field(default_factory=deque)
    awaiting: FakePending | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # a peer's thread may ask, too
    _max_blocks: int = field(init=False)  # of a sequence in one group
    _slots: dict[int, FakeSlot] = field(default_factory=dict)
    _plan: StepPlan = field(default_factory=lambda: StepPlan(number=0))  # the last
    _has_launched: bool = False  # the last plan
    _written: dict[int, int] = field(default_factory=dict)  # block -> last plan that wrote there

    def __post_init__(self) -> None:
        self.block_size = self.layout.block_size
        self.cells = [[None] * self.block_size for _ in range(self.num_blocks)]
        self._max_blocks = -(-self.limits.max_model_len // self.block_size)

    def execute(self, plan: StepPlan) -> FakePending:
        assert self.awaiting is None, "a step still waits for its masks"
        assert plan.number > self._plan.number
        self._plan, self._has_launched = plan, False
        self._check_rows(plan)
        self._apply(plan)
        if plan.has_rows:
            self.batches.append((plan.num_tokens, len(plan.decodes) + len(plan.chunks)))
            self.num_decode_rows += len(plan.decodes)
            error, self.fail_execute = self.fail_execute, None
            if error is not None:
                raise error
        for slot in plan.decodes:
            self._decode(slot)
        for chunk in plan.chunks:
            self._prefill(chunk)
        sampled = [*plan.decodes, *(chunk.slot for chunk in plan.chunks if chunk.samples)]
        self._has_launched = True
        error = None
        if plan.has_rows:
            error, self.fail_wait = self.fail_wait, None
        if plan.awaits_masks:
            self.awaiting = FakePending(self, StepResult(plan.number, sampled), error)
            return self.awaiting
        tokens = [self._sample(slot, None) for slot in sampled]
        scores = StepScores(
            {i: score([tokens[i]]) for i, slot in enumerate(sampled) if self._slots[slot].scores},
            {i: score(chunk.scored) for i, chunk in enumerate(plan.chunks) if chunk.scored},
            {i: self._pool_prompt(c) for i, c in enumerate(plan.chunks) if c.pooling and c.samples},
        )
        return FakePending(self, StepResult(plan.number, tokens, scores), error)

    def sample(self, masks: GrammarMasks) -> None:
        pending, self.awaiting = self.awaiting, None
        assert pending is not None and pending.result.number == masks.number
        slots = pending.result.tokens
        skipped = set(masks.skipped_rows)
        tokens = [
            self._hold(slot) if row in skipped else self._sample(slot, masks.masks.get(row))
            for row, slot in enumerate(slots)
        ]
        pending.result = StepResult(masks.number, tokens)

    def fail(self, where: str, message: str) -> None:
        """Make the next step fail, with `fail_execute` or `fail_wait`."""
        setattr(self, where, RuntimeError(message))

    def write_prompt(self, sequence: Sequence) -> None:
        """Write a reserved sequence's KV, as a decode worker does when it arrives."""
        first = sequence.num_computed_tokens
        for table in sequence.tables:
            start = max(first, table.first * self.block_size)
            self.write(table.block_ids, start, sequence.token_ids[start:])

    def write(self, block_ids: list[int], first: int, token_ids: list[int]) -> None:
        """Write the KV of tokens from a position on."""
        for position, token in enumerate(token_ids, first):
            self._put(block_ids, position, token)

    def content(self, sequence: Sequence) -> list[int | None]:
        """Return the blocks' content for all computed tokens of a sequence."""
        return self._content(sequence.tables[0].block_ids, sequence.num_computed_tokens)

    def has_group_events(self, plan: int) -> bool:
        is_last = plan == self._plan.number and self._has_launched
        exports = any(isinstance(work, Export) for work in self._plan.kv)
        return is_last and exports and not self.replays

    def pack(self, move: BlockMove, after: int) -> FakeMove:
        block_ids, groups, staging, seed, parts = move
        assert parts == 1
        if after:  # else it is a link's test, of any block in any state
            self._begin_move(block_ids, after)
            self.moved.append((block_ids, groups, after))
        copy_list = self._copy_list(block_ids, groups, seed)
        return self.queue(lambda: pack_blocks(self._pool(), copy_list, staging))

    def unpack(self, move: BlockMove, after: int) -> FakeMove:
        block_ids, groups, staging, seed, parts = move
        assert parts == 1
        self._begin_move(block_ids, after)
        copy_list = self._copy_list(block_ids, groups, seed)

        def write() -> None:
            pool = self._pool()
            unpack_blocks(staging, pool, copy_list, launched.corrupt)
            rows = pool.view(self.num_blocks, -1)[block_ids].tolist()
            for block, row in zip(block_ids, rows, strict=True):
                self.cells[block] = [None if cell == -1 else cell for cell in row]

        launched = self.queue(write)
        return launched

    def queue(self, work: Callable[[], object]) -> FakeMove:
        move = FakeMove(self, work)
        self.moves.append(move)
        return move

    def fence(self) -> None:
        self.run_moves()

    def run_moves(self) -> None:
        with self._lock:
            while self.moves:
                move = self.moves.popleft()
                move.work()
                move.has_run = True

    def warm_launch_path(self) -> None:
        """Do nothing: this device never pauses."""

    def _begin_move(self, block_ids: list[int], after: int) -> None:
        """Check that a move waits for every step that has written to its blocks."""
        error, self.fails_to_move = self.fails_to_move, None
        if error is not None:
            raise error
        assert all(self._written.get(block, 0) <= after for block in block_ids), "moved too early"

    def _copy_list(self, block_ids: list[int], groups: range, seed: int) -> torch.Tensor:
        rows = [block * NUM_GROUPS + group for block in block_ids for group in groups]
        return make_copy_list(rows, seed)

    def _pool(self) -> torch.Tensor:
        """Return the cells as a pool for real kernels, a row per layer group; -1: not written."""
        rows = [[-1 if cell is None else cell for cell in block] for block in self.cells]
        return torch.tensor(rows, dtype=torch.int32).view(self.num_blocks * NUM_GROUPS, -1)

    def _check_rows(self, plan: StepPlan) -> None:
        slots = [*plan.decodes, *(chunk.slot for chunk in plan.chunks)]
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.limits.max_num_seqs for slot in slots)
        for chunk in plan.chunks:
            is_row = chunk.length == 1 and chunk.samples and chunk.pooling is None
            assert chunk.length and not is_row, "this is a decode row"

    def _apply(self, plan: StepPlan) -> None:
        copied = [list(self.cells[source]) for source, _target in plan.copies]
        expected = {b for work in plan.kv if isinstance(work, Expect) for b in work.block_ids}
        assert expected.isdisjoint(b for pair in plan.copies for b in pair), "written meanwhile"
        for (_source, target), cells in zip(plan.copies, copied, strict=True):
            self.cells[target] = cells
            self._written[target] = plan.number
        for slot in plan.freed:
            self._slots.pop(slot, None)
        running = {*plan.decodes, *(chunk.slot for chunk in plan.chunks)}
        for new in plan.new_slots:
            owner = self._slots.get(new.slot)  # the same owner if the last plan failed to launch
            assert owner is None or owner.computed is None, "the device slot has an owner"
            self.new_slots.append(new)
            scores = new.spec.logprobs is not None
            tables: list[list[int]] = [[] for _ in self.layout.groups]
            self._slots[new.slot] = FakeSlot(new.spec.seed or 0, scores, tables)
            if new.slot not in running:
                self.prepared.append(new.slot)
        entries = plan.blocks
        for slot, entry, block in zip(
            entries.slots, entries.positions, entries.block_ids, strict=True
        ):
            group, position = divmod(entry, self._max_blocks)
            table = self._slots[slot].tables[group]
            if self.layout.groups[group].window is not None:
                table += [NO_BLOCK] * (position - len(table))
            assert len(table) == position
            table.append(block)
        for put in plan.inputs:
            assert put.slot in plan.decodes
            owned = self._slots[put.slot]
            assert owned.token is None, "a step has left a token there"
            owned.token, owned.position = put.token, put.position

    def _decode(self, number: int) -> None:
        slot = self._slots[number]
        assert slot.token is not None
        self._run(slot, slot.position, [slot.token])

    def _prefill(self, chunk: PrefillChunk) -> None:
        slot = self._slots[chunk.slot]
        assert slot.token is None, "this is past its prompt"
        self._run(slot, chunk.start, chunk.token_ids)

    def _run(self, slot: FakeSlot, start: int, tokens: list[int]) -> None:
        if slot.computed is not None:
            assert start == slot.computed
        slot.computed = start + len(tokens)
        assert slot.computed < self.limits.max_model_len
        self.longest_table = max(self.longest_table, len(slot.tables[0]))
        self._check_windows(slot, start)
        for table in slot.tables:
            for position, token in enumerate(tokens, start):
                self._put(table, position, token)

    def _check_windows(self, slot: FakeSlot, position: int) -> None:
        """Check that groups with a window have the first group's content where a token reads."""
        for group, table in zip(self.layout.groups, slot.tables, strict=True):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            for before in range(first, position):
                block, offset = divmod(before, self.block_size)
                cell = self.cells[slot.tables[0][block]][offset]
                assert self.cells[table[block]][offset] == cell

    def _put(self, table: list[int], position: int, token: int) -> None:
        block = table[position // self.block_size]
        assert block >= 0
        self.cells[block][position % self.block_size] = token
        self._written[block] = self._plan.number

    def _content(self, table: list[int], length: int) -> list[int | None]:
        return [cell for block in table for cell in self.cells[block]][:length]

    def _pool_prompt(self, chunk: PrefillChunk) -> bytes:
        table = self._slots[chunk.slot].tables[0]
        return pooled_prompt([cell or 0 for cell in self._content(table, chunk.end)])

    def _hold(self, number: int) -> int:
        """Sample nothing; a later plan sends the last token again. Returns a meaningless token."""
        slot = self._slots[number]
        assert slot.computed is not None
        slot.token, slot.computed = None, slot.computed - 1
        return VOCAB - 1

    def _sample(self, number: int, mask: bytes | None) -> int:
        slot = self._slots[number]
        assert slot.computed is not None
        seen = [cell for cell in self._content(slot.tables[0], slot.computed) if cell is not None]
        assert len(seen) == slot.computed
        token = next_token(slot.seed, seen)
        while mask is not None and not mask[token // 8] >> token % 8 & 1:
            token = (token + 1) % VOCAB
        slot.token, slot.position = token, slot.computed
        return token
