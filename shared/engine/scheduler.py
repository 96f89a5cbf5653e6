"""Which tokens the next step runs: continuous batching with chunked prefill.

Pure: no clocks, sockets or kernels.

Sequences wait in arrival order, run in a batch, and end. A step is scheduled before the tokens of
the step before it are known, so a running sequence may have one token in flight: its value is on
the device, its place is accounted for here. What the scheduler decides it also books: blocks are
taken, `num_computed_tokens` counts what the step will have computed.

When blocks run out, the youngest running sequence is preempted: it gives up all its blocks and
waits, first in the queue, to be computed again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.errors import ConfigError, InvalidRequestError, OverloadedError
from pagewire.shared.kv_cache.block_hash import BlockHasher
from pagewire.shared.kv_cache.block_pool import BlockPool
from pagewire.shared.request import RequestStatus

_BLOCKS_ARE_GOOD = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a batch and of the queue.

    Attributes:
        max_num_seqs: sequences that run at once; each has a slot on the device.
        max_num_batched_tokens: of one step.
        max_model_len: tokens of one sequence, output included.
        max_waiting: sequences in the queue.
        watermark_blocks: kept free when a sequence is admitted, so that those running can grow.
        local_prefill_tokens: up to this many uncached tokens no other worker is asked to compute.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int
    watermark_blocks: int = 0
    local_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """One sequence's part of a step.

    Attributes:
        start: position of the first token.
        length: tokens to run.
        samples: the last of them is the sequence's newest, so that a token is drawn.
        num_preemptions: of the sequence when scheduled; a result of an older life is not cached.
        input_token: of a decode row whose token is not in its slot: nothing was sampled there.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    num_preemptions: int
    input_token: int | None = None

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.length

    @property
    def is_decode(self) -> bool:
        """Whether this is a decode row: a single token, behind which the next one is drawn."""
        return self.samples and self.length == 1

    @property
    def is_stale(self) -> bool:
        """Whether the sequence has lost its blocks since."""
        return self.num_preemptions != self.sequence.num_preemptions


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A step: decode rows first, then prefill chunks."""

    decodes: list[ScheduledTokens]
    prefills: list[ScheduledTokens]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return len(self.decodes) + sum(chunk.length for chunk in self.prefills)

    def __iter__(self) -> Iterator[ScheduledTokens]:
        yield from self.decodes
        yield from self.prefills

    def sampled(self) -> list[ScheduledTokens]:
        """The parts that draw a token, in the order of the step's results."""
        return [part for part in self if part.samples]


@dataclass(slots=True)
class Scheduler:
    """The queue, the running batch and the block pool behind them.

    Attributes:
        on_admitted: told of a sequence that got its blocks for the first time.
        on_reserved: told of a sequence whose blocks now wait for another worker's KV.

    Raises:
        ConfigError: the longest sequence needs more blocks than there are.
    """

    limits: SchedulerLimits
    pool: BlockPool
    hasher: BlockHasher
    on_admitted: Callable[[Sequence], None] = lambda _sequence: None
    on_reserved: Callable[[Sequence], None] = lambda _sequence: None
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    reserved: dict[str, Sequence] = field(default_factory=dict)
    held: dict[str, Sequence] = field(default_factory=dict)
    _free_slots: list[int] = field(init=False)
    num_preemptions: int = 0
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
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, status: RequestStatus) -> None:
        """End a sequence and free what it has, unless its blocks are to be held for sending."""
        was = sequence.status
        sequence.transition(status)
        if was is RequestStatus.RUNNING:
            self.running.remove(sequence)
        elif was is RequestStatus.RESERVED:
            del self.reserved[sequence.request_id]
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

    def schedule(self) -> ScheduledBatch | None:
        """Choose and book the next step; None if nothing can run."""
        budget = self.limits.max_num_batched_tokens
        before = self.num_preemptions
        decodes: list[ScheduledTokens] = []
        prefills: list[ScheduledTokens] = []
        # Decode rows before chunks: a long prompt does not hold up those who are talking.
        order = sorted(self.running, key=lambda sequence: sequence.num_uncomputed_tokens != 1)
        for sequence in order:
            if budget == 0:
                break
            if sequence.status is RequestStatus.RUNNING and self._wants_to_run(sequence):
                part = self._grow(sequence, budget)
                if part is not None:
                    (decodes if part.is_decode else prefills).append(part)
                    budget -= part.length
        if self.num_preemptions == before:
            self._admit_waiting(decodes, prefills, budget)
        # A later sequence's growth may have preempted an earlier choice.
        batch = ScheduledBatch(
            [part for part in decodes if not part.is_stale],
            [part for part in prefills if not part.is_stale],
        )
        for part in batch:
            self._book(part)
        return batch if batch.num_tokens else None

    def register_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the blocks that tokens `start .. end - 1` filled findable: their KV is written."""
        size = self._block_size
        if start // size == end // size:
            return
        sequence.extend_hashes(self.hasher)
        full = min(end // size, len(sequence.block_hashes))
        self.pool.register(sequence.block_ids, sequence.block_hashes, start // size, full)

    def _admit_waiting(
        self, decodes: list[ScheduledTokens], prefills: list[ScheduledTokens], budget: int
    ) -> None:
        """Admit from the queue while there is room."""
        while budget > 0 and (admitted := self._admit()) is not None:
            if admitted.status is RequestStatus.RUNNING:
                part = self._grow(admitted, budget)
                if part is not None:
                    (decodes if part.is_decode else prefills).append(part)
                    budget -= part.length

    def _wants_to_run(self, sequence: Sequence) -> bool:
        """Whether a further token may be run before those in flight are known."""
        if sequence.num_in_flight_tokens == 0:
            return True
        at_end = sequence.num_output_tokens >= sequence.sampling.max_tokens
        return (
            not (at_end or sequence.prefill_only)
            and sequence.num_tokens < self.limits.max_model_len
        )

    def _grow(self, sequence: Sequence, budget: int) -> ScheduledTokens | None:
        """Take the blocks for a sequence's next tokens, preempting younger ones for them."""
        length = min(sequence.num_uncomputed_tokens, budget)
        end = sequence.num_computed_tokens + length
        while (missing := self._blocks_for(end) - len(sequence.block_ids)) > 0:
            if missing <= self.pool.num_available:
                sequence.block_ids.extend(self.pool.allocate(missing))
                break
            victim = self._preempt_youngest()
            if victim is None or victim is sequence:
                return None
        return ScheduledTokens(
            sequence=sequence,
            start=sequence.num_computed_tokens,
            length=length,
            samples=end == sequence.num_tokens,
            num_preemptions=sequence.num_preemptions,
            input_token=self._missing_input(sequence, length, end),
        )

    def _missing_input(self, sequence: Sequence, length: int, end: int) -> int | None:
        """Return the token of a decode row that no step has left in the slot."""
        is_decode = length == 1 and end == sequence.num_tokens
        if sequence.decodes_from_slot or not is_decode:
            return None
        return sequence.token_ids[end - 1]

    def _admit(self) -> Sequence | None:
        """Give the first in the queue its blocks and a slot, if there are enough of both."""
        if not self.waiting or not self._free_slots:
            return None
        sequence = self.waiting[0]
        if sequence.num_in_flight_tokens > 0:
            return None  # preempted in mid-step; its newest token is known a step later
        sequence.extend_hashes(self.hasher)
        cached = self._usable_prefix(sequence)
        missing = self._blocks_for(len(sequence.token_ids)) - len(cached)
        reserve = self.limits.watermark_blocks if self.running or self.reserved else 0
        if missing + reserve > self.pool.num_available - self.pool.num_evictable(cached):
            return None
        self.waiting.popleft()
        self.pool.acquire(cached)
        sequence.block_ids = [*cached, *self.pool.allocate(missing)]
        sequence.num_computed_tokens = len(cached) * self._block_size
        sequence.slot = self._free_slots.pop()
        sequence.decodes_from_slot = False
        first_time = sequence.num_cached_tokens is None
        if first_time:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        if sequence.num_uncomputed_tokens <= self.limits.local_prefill_tokens:
            sequence.remote_prefill = False
        if sequence.remote_prefill:
            sequence.transition(RequestStatus.RESERVED)
            self.reserved[sequence.request_id] = sequence
            self.on_reserved(sequence)
        else:
            sequence.transition(RequestStatus.RUNNING)
            self.running.append(sequence)
        if first_time:
            self.on_admitted(sequence)
        return sequence

    def _usable_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of a sequence, at least one token short of all it has."""
        if not self.pool.enable_caching:
            return []
        most = (len(sequence.token_ids) - 1) // self._block_size
        return self.pool.lookup(sequence.block_hashes[:most])

    def _book(self, part: ScheduledTokens) -> None:
        sequence = part.sequence
        sequence.num_computed_tokens = part.end
        if part.samples:
            sequence.num_in_flight_tokens += 1
            sequence.decodes_from_slot = True

    def _preempt_youngest(self) -> Sequence | None:
        if not self.running:
            return None
        victim = self.running.pop()
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
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None
        sequence.decodes_from_slot = False

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1

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
