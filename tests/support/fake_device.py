"""An executor without a model, which notices every wrong read of the paged cache.

Its "KV" of a position is the token that was run there; the next token is a function of the seed
and of all the tokens that the block table leads to. So a sequence ends with the right tokens only
if every block held what it should whenever it was read.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import cast

import torch

from pagewire.kernels.kv_staging import move_order
from pagewire.kernels.reference.kv_pack import pack_blocks, unpack_blocks
from pagewire.shared.engine.block_mover import PendingCheck, PendingMove
from pagewire.shared.engine.core import EngineCore
from pagewire.shared.engine.cuda_graph import Marker
from pagewire.shared.engine.model_runner import PendingTokens
from pagewire.shared.engine.scheduler import (
    ScheduledBatch,
    ScheduledTokens,
    Scheduler,
    SchedulerLimits,
)
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.kv_cache.block_hash import BlockHasher
from pagewire.shared.kv_cache.block_pool import BlockPool, CacheListener
from pagewire.shared.sampling import ResolvedSampling

VOCAB = 7
BYTES_PER_TOKEN = 4  # of the fake KV
NUM_PARTS = 2  # of a block; a part is not some layers here but some of its tokens


def next_token(seed: int, tokens: list[int]) -> int:
    """What the fake model samples behind these tokens."""
    return zlib.crc32(bytes([seed, *tokens])) % VOCAB


def generate(sequence: Sequence, max_model_len: int) -> list[int]:
    """All outputs that a sequence should end with, those it was resumed with included."""
    tokens, prompt = list(sequence.token_ids), sequence.num_prompt_tokens
    limit = 1 if sequence.prefill_only else sequence.sampling.max_tokens
    while len(tokens) - prompt < limit and len(tokens) < max_model_len:
        tokens.append(next_token(sequence.sampling.seed or 0, tokens))
        if tokens[-1] in sequence.stop_token_ids:
            break
    return tokens[prompt:]


def make_sequence(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    stop: frozenset[int] = frozenset(),
    resumed: list[int] | None = None,
    remote_prefill: bool = False,
    prefill_only: bool = False,
    seed: int = 0,
) -> Sequence:
    """A sequence as `new_sequence` makes them."""
    return Sequence(
        request_id=request_id,
        token_ids=[*prompt, *(resumed or [])],
        num_prompt_tokens=len(prompt),
        num_resumed_tokens=len(resumed or []),
        sampling=ResolvedSampling(max_tokens=max_tokens, seed=seed),
        stop_token_ids=stop,
        remote_prefill=remote_prefill,
        prefill_only=prefill_only,
    )


class FakePending(PendingTokens):
    """Results of a launched step, which may turn out to be an error."""

    def __init__(self, device: FakeDevice, tokens: list[int], error: Exception | None) -> None:
        super().__init__(torch.tensor(tokens))
        self._device = device
        self._error = error

    def is_done(self) -> bool:
        return self._device.has_run and super().is_done()

    def wait(self) -> list[int]:
        if self._error is not None:
            raise self._error
        return super().wait()


class FakeMove(PendingMove):
    """A move that is not done before the device says so."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(None)
        self._device = device

    def is_done(self) -> bool:
        return self._device.has_moved


class FakeCheck(PendingCheck):
    """The same, checked."""

    def __init__(self, device: FakeDevice, damaged: torch.Tensor) -> None:
        super().__init__(damaged, None)
        self._device = device

    def is_done(self) -> bool:
        return self._device.has_moved


@dataclass(frozen=True)
class FakeMarker:
    """A point in the work: what a step does for one part of its blocks, and all before."""

    step: int
    part: int


@dataclass
class FakeDevice:
    """Runs batches in the order in which they are launched, and checks each.

    Attributes:
        cells: [block][offset], the token that was run there.
        batches: (tokens, sequences) of every step.
        num_decode_rows: of all steps together.
        longest_table: most blocks that a sequence ever had in a step.
        introduced: sequences that were made known before they ran.
        marks_parts: set by whoever packs.
        replays: steps are such that tell nothing but their end.
        moved: positions in the pool, parts of them, and the marker, of all that was packed.
        has_run: whether the device is done with its steps.
        has_moved: whether it is done with what it packs and unpacks.
        fail_execute, fail_wait: raised by the next step.
    """

    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    cells: list[list[int | None]] = field(init=False)
    batches: list[tuple[int, int]] = field(default_factory=list)
    num_decode_rows: int = 0
    longest_table: int = 0
    introduced: list[str] = field(default_factory=list)
    marks_parts: bool = False
    replays: bool = False
    moved: list[tuple[list[int], range, FakeMarker]] = field(default_factory=list)
    has_run: bool = True
    has_moved: bool = True
    fail_execute: Exception | None = None
    fail_wait: Exception | None = None
    _slots: dict[int, tuple[Sequence, int, int]] = field(default_factory=dict)
    _ends: dict[tuple[Sequence, int], int] = field(default_factory=dict)
    _step: int = 0
    _has_launched: bool = False  # the last step
    _written: dict[int, int] = field(default_factory=dict)  # block -> last step that wrote there

    def __post_init__(self) -> None:
        self.cells = [[None] * self.block_size for _ in range(self.num_blocks)]

    def execute(self, batch: ScheduledBatch) -> FakePending:
        self._check_batch(batch)
        self.batches.append((batch.num_tokens, len(list(batch))))
        self.num_decode_rows += len(batch.decodes)
        self._step, self._has_launched = self._step + 1, False
        error, self.fail_execute = self.fail_execute, None
        if error is not None:
            raise error
        for part in batch:
            self.longest_table = max(self.longest_table, len(part.sequence.block_ids))
            self._write(part)
        tokens = [self._sample(part) for part in batch.sampled()]
        self._has_launched = True
        error, self.fail_wait = self.fail_wait, None
        return FakePending(self, tokens, error)

    def introduce(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.introduced.append(sequence.request_id)

    def write_prompt(self, sequence: Sequence) -> None:
        """Bring a reserved sequence's KV, as a decode worker's scatterer does."""
        for position in range(sequence.num_computed_tokens, len(sequence.token_ids)):
            self._put(sequence, position, sequence.token_ids[position])

    def content(self, sequence: Sequence) -> list[int | None]:
        """What the blocks hold of all that a sequence has computed."""
        cells = [cell for block in sequence.block_ids for cell in self.cells[block]]
        return cells[: sequence.num_computed_tokens]

    def mark(self) -> Marker:
        return cast("Marker", FakeMarker(self._step, NUM_PARTS))

    def part_markers(self) -> list[Marker]:
        if not self.marks_parts or self.replays or not self._has_launched:
            return []
        return [cast("Marker", FakeMarker(self._step, part)) for part in range(NUM_PARTS)]

    def pack(
        self, block_ids: list[int], parts: range, staging: torch.Tensor, seed: int, after: Marker
    ) -> PendingMove:
        marker = cast("FakeMarker", after)
        for block in block_ids:
            written = self._written.get(block, 0)
            assert (written, parts[-1]) <= (marker.step, marker.part), "packed before it is final"
        self.moved.append((block_ids, parts, marker))
        pack_blocks(self._pool(), self._order(block_ids, parts, seed), staging)
        return FakeMove(self)

    def unpack(
        self, staging: torch.Tensor, block_ids: list[int], parts: range, seed: int, after: Marker
    ) -> PendingCheck:
        pool = self._pool()
        damaged = torch.zeros((), dtype=torch.int64)
        unpack_blocks(staging, pool, self._order(block_ids, parts, seed), damaged)
        for block, row in zip(block_ids, pool.view(self.num_blocks, -1)[block_ids], strict=True):
            self.cells[block] = [None if cell == -1 else cell for cell in row.tolist()]
        return FakeCheck(self, damaged)

    def _order(self, block_ids: list[int], parts: range, seed: int) -> torch.Tensor:
        rows = [block * NUM_PARTS + part for block in block_ids for part in parts]
        return move_order(rows, seed)

    def _pool(self) -> torch.Tensor:
        """The cells as a pool of the real operations, a row a part; -1 was never written."""
        rows = [[-1 if cell is None else cell for cell in block] for block in self.cells]
        return torch.tensor(rows, dtype=torch.int32).view(self.num_blocks * NUM_PARTS, -1)

    def _check_batch(self, batch: ScheduledBatch) -> None:
        parts = list(batch)
        assert 1 <= batch.num_tokens <= self.limits.max_num_batched_tokens
        assert sum(part.length for part in parts) == batch.num_tokens
        assert len({id(part.sequence) for part in parts}) == len(parts)
        slots = [part.sequence.slot for part in parts]
        assert len(set(slots)) == len(slots)
        assert all(slot is not None and 0 <= slot < self.limits.max_num_seqs for slot in slots)
        for part in batch.decodes:
            assert part.is_decode
        for part in batch.prefills:
            assert not part.is_decode
        for part in parts:
            self._check_part(part)

    def _check_part(self, part: ScheduledTokens) -> None:
        sequence = part.sequence
        assert part.length >= 1
        assert not sequence.is_finished and not part.is_stale
        assert part.end == sequence.num_computed_tokens
        assert part.end <= len(sequence.block_ids) * self.block_size
        assert part.end < self.limits.max_model_len
        life = (sequence, sequence.num_preemptions)
        if life in self._ends:
            assert part.start == self._ends[life]
        elif sequence.num_preemptions == 0 and sequence.num_cached_tokens is not None:
            assert part.start in (sequence.num_cached_tokens, len(sequence.token_ids) - 1)
        self._ends[life] = part.end

    def _write(self, part: ScheduledTokens) -> None:
        sequence = part.sequence
        if part.is_decode and part.input_token is None:
            owner, position, token = self._slots[sequence.slot or 0]
            assert owner is sequence and position == part.start
            self._put(sequence, position, token)
            return
        for position in range(part.start, part.end):
            self._put(sequence, position, sequence.token_ids[position])

    def _put(self, sequence: Sequence, position: int, token: int) -> None:
        block = sequence.block_ids[position // self.block_size]
        self.cells[block][position % self.block_size] = token
        self._written[block] = self._step

    def _sample(self, part: ScheduledTokens) -> int:
        sequence = part.sequence
        seen = [cell for cell in self.content(sequence) if cell is not None]
        assert len(seen) == part.end
        token = next_token(sequence.sampling.seed or 0, seen)
        self._slots[sequence.slot or 0] = (sequence, part.end, token)
        return token


def make_core(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 1024,
    max_waiting: int = 1024,
    watermark_blocks: int = 0,
    local_prefill_tokens: int = 0,
    caching: bool = True,
    overlap: bool = False,
    listener: CacheListener | None = None,
) -> tuple[EngineCore, FakeDevice]:
    """An engine over a fake device; no sequence is longer than the pool."""
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=min(max_model_len, num_blocks * block_size),
        max_waiting=max_waiting,
        watermark_blocks=watermark_blocks,
        local_prefill_tokens=local_prefill_tokens,
    )
    pool = BlockPool(num_blocks, caching, listener)
    scheduler = Scheduler(limits, pool, BlockHasher("secret", "fake", "int", block_size))
    device = FakeDevice(limits, num_blocks, block_size)
    return EngineCore(scheduler, device, overlap), device
