"""The executor of one device: builds the inputs of a plan, launches the model, samples.

`execute` only launches. The tokens come back through pinned memory and are read a step later, so
that the host prepares the next step while the device runs this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from pagewire.kernels import Ops
from pagewire.shared.engine.block_mover import BlockMover, PendingCheck, PendingMove
from pagewire.shared.engine.cuda_graph import (
    DecodeGraphs,
    DeviceEvent,
    GraphPool,
    PrefillGraphs,
    Sampled,
    batch_buckets,
    prefill_shapes,
)
from pagewire.shared.engine.device_state import DeviceState
from pagewire.shared.engine.pending import PendingSupply, PendingTokens
from pagewire.shared.engine.plan_events import PlanEvents
from pagewire.shared.engine.prefill_inputs import PrefillInputs
from pagewire.shared.engine.scoring import Scoring
from pagewire.shared.engine.step import Expect, Export, PrefillChunk, StepPlan, Supply
from pagewire.shared.errors import IntegrityError
from pagewire.shared.model.inputs import ForwardBatch, OnLayerEnd


class CausalLM(Protocol):
    """What the runner needs of a model."""

    def forward(
        self, batch: ForwardBatch, kv_pool: torch.Tensor, on_layer_end: OnLayerEnd | None = None
    ) -> torch.Tensor:
        """Return the final hidden states [T, hidden]; writes the step's KV."""
        ...

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [N, vocab] logits of [N, hidden] states, in `out` if it is given."""
        ...


@dataclass(slots=True)
class ModelRunner:
    """The executor of one process with one device; moves its KV blocks, too.

    Attributes:
        kv_pool: [NB, L, 2, KH, BS, D].
        decode_graphs, prefill_graphs: steps as CUDA graphs, if there are any.
        mover: moves blocks of the pool.
        scoring: computes log probabilities where a device slot asks for them.
    """

    model: CausalLM
    ops: Ops
    kv_pool: torch.Tensor
    state: DeviceState
    decode_graphs: DecodeGraphs | None = None
    prefill_graphs: PrefillGraphs | None = None
    mover: BlockMover = field(init=False)
    scoring: Scoring = field(init=False)
    _logits: torch.Tensor | None = None  # [S, vocab], of all graphs, of which one runs at a time
    _events: PlanEvents = field(default_factory=PlanEvents)
    _group_events: list[DeviceEvent] = field(default_factory=list)  # of the present plan
    _records_groups: bool = False  # the present plan does
    _awaiting: PendingSupply | None = None

    def __post_init__(self) -> None:
        self.mover = BlockMover(self.ops, self.kv_pool)
        self.scoring = Scoring(self.ops, self.state.upload)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return int(self.kv_pool.shape[4])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingTokens | PendingSupply:
        """Launch a step. Later calls' work is ordered after it.

        Raises:
            IntegrityError: the step before has not been supplied with what it awaits.
        """
        if self._awaiting is not None:
            raise IntegrityError(f"step {self._awaiting.number} waits for a supply")
        if plan.copies:
            self._copy_blocks(plan.copies)
        if any(isinstance(work, Expect) for work in plan.kv):
            # A block that is copied from may be one that is expected.
            self._events.note(plan.number - 1, [self.mover.record_event()])
        self._group_events = []
        self._records_groups = any(isinstance(work, Export) for work in plan.kv)
        self.state.apply(plan)
        self.scoring.apply(plan)
        pending = self._launch(plan)
        if self._records_groups:
            is_complete = len(self._group_events) == self.mover.groups.count
            events = self._group_events if is_complete else [self.mover.record_event()]
            self._events.note(plan.number, events)
        return pending

    @torch.inference_mode()
    def supply(self, supply: Supply) -> None:
        """Let the step that awaits it sample.

        Raises:
            IntegrityError: it is another step that waits, or none.
        """
        pending, self._awaiting = self._awaiting, None
        if pending is None or pending.number != supply.number:
            raise IntegrityError(f"step {supply.number} does not wait for a supply")
        logits = self.model.compute_logits(pending.hidden)
        raw = logits.clone() if supply.masks and self.scoring.of_tokens else logits
        for row, mask in supply.masks.items():
            logits[row] = logits[row].masked_fill(~self._allowed(mask, logits), -torch.inf)
        tokens = self._sample(logits, pending.slots, pending.positions).tokens
        self._score(Sampled(tokens, raw), pending.host_slots)
        pending.tokens = PendingTokens(pending.number, tokens, self.scoring.take())

    def _allowed(self, mask: bytes, logits: torch.Tensor) -> torch.Tensor:
        """Return which tokens a mask allows, [vocab] bool."""
        packed = np.frombuffer(mask, np.uint8)
        bits = np.unpackbits(packed, count=logits.shape[1], bitorder="little")
        return torch.from_numpy(bits.astype(bool)).to(logits.device)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, targets = self.state.upload([list(side) for side in zip(*copies, strict=True)])
        self.kv_pool.index_copy_(0, targets, self.kv_pool.index_select(0, sources))

    def _launch(self, plan: StepPlan) -> PendingTokens | PendingSupply:
        slots, chunks = plan.decodes, plan.chunks
        if not plan.has_rows:
            return PendingTokens(plan.number, torch.empty(0, dtype=torch.int64))
        if plan.awaits_supply:
            sampling = [*slots, *(chunk.slot for chunk in chunks if chunk.samples)]
            pending = PendingSupply(plan.number, *self._forward(slots, chunks), sampling)
            self._awaiting = pending
            return pending
        tokens = self._replay(slots, chunks)
        if tokens is None and not chunks:
            sampled = self.decode(self.state.upload([slots])[0])
            tokens = self._score(sampled, slots)
        if tokens is None:
            tokens = self._run_mixed(slots, chunks)
        return PendingTokens(plan.number, tokens, self.scoring.take())

    def _replay(self, slots: list[int], chunks: list[PrefillChunk]) -> torch.Tensor | None:
        """Run a step by CUDA graphs, or return None if there are none for all of it.

        Decode rows and small chunks take two graphs: to read the weights twice is quicker than
        to launch every kernel. The decode's tokens must survive the prefill's replay, and they do,
        being alive when the prefill graphs were captured in the same memory.
        """
        tokens = []
        shape = None
        if slots and (self.decode_graphs is None or not self.decode_graphs.fits(len(slots))):
            return None
        if chunks:
            if self.prefill_graphs is not None:
                shape = self.prefill_graphs.shape_of(chunks, with_decodes=bool(slots))
            if shape is None:
                return None
        if slots and self.decode_graphs is not None:
            # Now: the prefill's logits come into the same memory.
            tokens.append(self._score(self.decode_graphs.replay(slots), slots))
        if shape is not None and self.prefill_graphs is not None:
            sampled = self.prefill_graphs.replay(chunks, shape, self.state.host_tables)
            tokens.append(self._score(sampled, [], chunks, first=len(slots)))
            if self._records_groups:
                self._group_events = self.prefill_graphs.events_of(shape)
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens)

    def _score(
        self,
        sampled: Sampled,
        slots: list[int],
        chunks: Iterable[PrefillChunk] = (),
        first: int = 0,
    ) -> torch.Tensor:
        """Launch the tokens' log probabilities if a device slot asks for them; return the tokens.

        Args:
            sampled: of the decode rows and of the chunks that sample.
            slots: device slots of the decode rows.
            chunks: likewise; some may not sample.
            first: index in the step's tokens of the first row.
        """
        if self.scoring.of_tokens:
            rows = [*slots, *(chunk.slot for chunk in chunks if chunk.samples)]
            self.scoring.score_tokens(sampled.logits, sampled.tokens, rows, first)
        return sampled.tokens

    def decode(self, slots: torch.Tensor) -> Sampled:
        """Run one decode step of these device slots, [B] int64.

        Everything is read from and written to the device, so that this can be captured.
        """
        inputs = self._decode_inputs(slots)
        hidden = self.model.forward(inputs, self.kv_pool)
        # The padding device slot stays at position 0: it runs in more steps than a sequence.
        is_real = slots != self.state.padding_slot
        positions = torch.where(is_real, inputs.positions + 1, 0)
        return self._sample(self._compute_logits(hidden), slots, positions)

    def prefill(self, inputs: PrefillInputs, on_layer_end: OnLayerEnd | None = None) -> Sampled:
        """Run a step of prefill chunks alone; those sample that are to.

        Everything is read from and written to the device, so that this can be captured.
        """
        forward = inputs.forward_batch(self.state.block_tables)
        hidden = self.model.forward(forward, self.kv_pool, on_layer_end)
        logits = self._compute_logits(hidden[inputs.rows])
        return self._sample(logits, inputs.sample_slots, inputs.sample_positions)

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits that stay where they are when a graph that has computed them ends."""
        out = None if self._logits is None else self._logits[: len(hidden)]
        return self.model.compute_logits(hidden, out)

    def _decode_inputs(self, slots: torch.Tensor) -> ForwardBatch:
        state = self.state
        position = state.position[slots]
        tables = state.block_tables[slots]
        is_real = slots != state.padding_slot
        block = tables.gather(1, (position // self.block_size)[:, None]).squeeze(1)
        slot_mapping = block.to(torch.int64) * self.block_size + position % self.block_size
        return ForwardBatch(
            input_ids=state.last_token[slots],
            positions=position,
            slot_mapping=torch.where(is_real, slot_mapping, -1),
            num_decodes=slots.shape[0],
            decode_block_tables=tables,
            decode_seq_lens=torch.where(is_real, position + 1, 0).to(torch.int32),
            prefill_block_tables=None,
            prefill_cu_query_lens=None,
            prefill_seq_lens=None,
            max_query_len=0,
        )

    def _run_mixed(self, slots: list[int], chunks: list[PrefillChunk]) -> torch.Tensor:
        """Run decode rows, if any, and prefill chunks in one pass; returns the tokens."""
        hidden, sample_slots, positions = self._forward(slots, chunks)
        if not len(hidden):
            # On the device all the same: a step is waited for by its tokens.
            return sample_slots
        sampled = self._sample(self.model.compute_logits(hidden), sample_slots, positions)
        return self._score(sampled, slots, chunks)

    def _forward(
        self, slots: list[int], chunks: list[PrefillChunk]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the model; returns hidden states, device slots and positions of rows that sample."""
        state = self.state
        on_layer_end = self._event_recorder(self._group_events) if self._records_groups else None
        if not chunks:
            decode_slots = state.upload([slots])[0]
            decodes = self._decode_inputs(decode_slots)
            hidden = self.model.forward(decodes, self.kv_pool, on_layer_end)
            return hidden, decode_slots, decodes.positions + 1
        inputs = PrefillInputs.build(chunks, self.block_size, state.host_tables).to(state.device)
        forward = inputs.forward_batch(state.block_tables)
        if not slots:
            hidden = self.model.forward(forward, self.kv_pool, on_layer_end)
            self._score_prompts(hidden, chunks)
            return hidden[inputs.rows], inputs.sample_slots, inputs.sample_positions
        decode_slots = state.upload([slots])[0]
        decodes = self._decode_inputs(decode_slots)
        hidden = self.model.forward(_joined(decodes, forward), self.kv_pool, on_layer_end)
        self._score_prompts(hidden[len(slots) :], chunks)
        decode_rows = torch.arange(len(slots), device=state.device)
        return (
            hidden[torch.cat([decode_rows, inputs.rows + len(slots)])],
            torch.cat([decode_slots, inputs.sample_slots]),
            torch.cat([decodes.positions + 1, inputs.sample_positions]),
        )

    def _score_prompts(self, hidden: torch.Tensor, chunks: list[PrefillChunk]) -> None:
        """Launch the log probabilities of the prompts that ask; `hidden` is [T, hidden]."""
        start = 0
        for index, chunk in enumerate(chunks):
            if chunk.scored:
                own = hidden[start : start + chunk.length]
                self.scoring.score_prompt(index, chunk, own, self.model.compute_logits)
            start += chunk.length

    def _sample(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> Sampled:
        """Draw a token a row of `logits` [B, vocab] and leave it in its device slot."""
        state = self.state
        tokens = self.ops.sample(logits, positions=positions, **state.sampling(slots))
        state.last_token.index_copy_(0, slots, tokens)
        state.position.index_copy_(0, slots, positions)
        return Sampled(tokens, logits)

    def _event_recorder(self, events: list[DeviceEvent], *, in_graph: bool = False) -> OnLayerEnd:
        """Return a callback that appends an event at the end of each layer group of a step."""
        layers_per_group = self.kv_pool.shape[1] // self.mover.groups.count

        def record_group_end(layer: int) -> None:
            if (layer + 1) % layers_per_group == 0:
                events.append(self.mover.record_event(in_graph=in_graph))

        return record_group_end

    def _captured_prefill(self, inputs: PrefillInputs, events: list[DeviceEvent]) -> Sampled:
        return self.prefill(inputs, self._event_recorder(events, in_graph=True))

    def has_group_events(self, plan: int) -> bool:
        """Whether it is known where in this plan each layer group of its blocks is final."""
        return self._events.has_group_events(plan)

    def pack(
        self, block_ids: list[int], groups: range, staging: torch.Tensor, seed: int, after: int
    ) -> PendingMove:
        """Gather blocks into a staging buffer, as `BlockMoves` says."""
        event = self._events.find(after, groups[-1])
        return self.mover.pack(block_ids, groups, staging, seed, event)

    def queue(self, work: Callable[[], object]) -> PendingMove:
        """Queue other work on the device after the moves so far."""
        return self.mover.queue(work)

    def unpack(
        self, staging: torch.Tensor, block_ids: list[int], groups: range, seed: int, after: int
    ) -> PendingCheck:
        """Scatter a staging buffer into blocks, as `BlockMoves` says."""
        event = self._events.find(after, groups[-1])
        return self.mover.unpack(staging, block_ids, groups, seed, event)

    def capture_graphs(self, max_tokens: int, progress: Callable[[str], None]) -> None:
        """Capture decode steps, and prefill steps of up to `max_tokens`; `progress` hears each."""
        state = self.state
        with torch.inference_mode():
            every = torch.full((state.num_slots,), state.padding_slot, device=state.device)
            self._logits = self.decode(every).logits
        pool = GraphPool(state.device)
        sizes = batch_buckets(state.num_slots)
        self.decode_graphs = DecodeGraphs.capture(
            self.decode, sizes, state.padding_slot, state.device, pool, progress
        )
        shapes = prefill_shapes(max_tokens, state.num_slots)
        self.prefill_graphs = PrefillGraphs.capture(
            self._captured_prefill,
            shapes,
            self.block_size,
            state.padding_slot,
            state.device,
            pool,
            progress,
        )


def _joined(decodes: ForwardBatch, prefills: ForwardBatch) -> ForwardBatch:
    """Put decode rows in front of prefill chunks."""
    return ForwardBatch(
        input_ids=torch.cat([decodes.input_ids, prefills.input_ids]),
        positions=torch.cat([decodes.positions, prefills.positions]),
        slot_mapping=torch.cat([decodes.slot_mapping, prefills.slot_mapping]),
        num_decodes=decodes.num_decodes,
        decode_block_tables=decodes.decode_block_tables,
        decode_seq_lens=decodes.decode_seq_lens,
        prefill_block_tables=prefills.prefill_block_tables,
        prefill_cu_query_lens=prefills.prefill_cu_query_lens,
        prefill_seq_lens=prefills.prefill_seq_lens,
        max_query_len=prefills.max_query_len,
    )
