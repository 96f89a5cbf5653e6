"""The executor of one device: builds the inputs of a plan, launches the model, samples.

    execute --> _copy_blocks, state.apply --> _replay (CUDA graphs) or _run (eager) --> _sample

`execute` only launches. The tokens come back through pinned memory and are read a step later, so
that the host prepares the next step while the device runs this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from pagewire.kernels import Ops
from pagewire.kernels.kv_staging import as_words
from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.engine.execution.block_mover import (
    BlockMove,
    BlockMover,
    PendingCheck,
    PendingMove,
)
from pagewire.shared.engine.execution.cuda_graph import (
    STEP_TOKENS,
    DecodeGraphs,
    DeviceEvent,
    GraphPool,
    PrefillGraphs,
    Progress,
    SamplingGraphs,
    batch_buckets,
    step_shapes,
)
from pagewire.shared.engine.execution.decode_inputs import decode_inputs, joined
from pagewire.shared.engine.execution.device_state import DeviceState
from pagewire.shared.engine.execution.pending import (
    LaunchedRows,
    PendingMasks,
    PendingTokens,
    StepEvents,
)
from pagewire.shared.engine.execution.plan_events import PlanEvents
from pagewire.shared.engine.execution.pooling import Pooling
from pagewire.shared.engine.execution.sampling_stage import (
    Forwarded,
    Sampled,
    SamplingStage,
    StaticRows,
)
from pagewire.shared.engine.execution.scoring import Scoring
from pagewire.shared.engine.execution.step_inputs import HostStep, Rounding, StepInputs
from pagewire.shared.engine.scheduling.step import (
    Expect,
    Export,
    GrammarMasks,
    PrefillChunk,
    StepPlan,
)
from pagewire.shared.kv.kv_layout import KvLayout
from pagewire.shared.model.inputs import LayerKv, OnLayerEnd
from pagewire.shared.model.loaded_model import CausalLM


@dataclass(slots=True)
class ModelRunner:
    """The executor of one device, and its `BlockMoves`: it packs and unpacks blocks, too.

    Attributes:
        kv_pool: [NB, L, N, KH, BS, D]; L is the number of layers of one cache group, N the number
            of components (keys and values, or latent vectors).
        layout: of the blocks.
        state: the device slots.
        vocab_size: number of logits of a row.
        decode_graphs, prefill_graphs: captured forwards; None without CUDA graphs.
        sampling_graphs: captured sampling; None without CUDA graphs.
        rounding: pads steps that no CUDA graph replays, on a GPU; None pads none.
        mover: packs and unpacks blocks of the pool.
        sampling: draws tokens from logits.
        scoring: computes log probabilities for device slots that ask for them.
        pooling: makes the embeddings of prompts.
    """

    model: CausalLM
    ops: Ops
    kv_pool: torch.Tensor
    layout: KvLayout
    state: DeviceState
    vocab_size: int
    decode_graphs: DecodeGraphs | None = None
    prefill_graphs: PrefillGraphs | None = None
    sampling_graphs: SamplingGraphs | None = None
    rounding: Rounding | None = None
    mover: BlockMover = field(init=False)
    _layers: list[LayerKv] = field(init=False)
    sampling: SamplingStage = field(init=False)
    scoring: Scoring = field(init=False)
    pooling: Pooling = field(default_factory=Pooling)
    _static: StaticRows | None = None  # if there are CUDA graphs
    _events: PlanEvents = field(default_factory=PlanEvents)
    # Of the plan that is being launched: an event after each layer group, if it exports blocks.
    _group_events: list[DeviceEvent] = field(default_factory=list)
    _records_groups: bool = False
    _awaiting: PendingMasks | None = None  # the step that waits for its masks
    _last_step: StepEvents | None = None  # of the last step that was launched; None on a CPU

    def __post_init__(self) -> None:
        self.mover = BlockMover(self.ops, self.kv_pool, self.layout)
        self._layers = [LayerKv(group, self.kv_pool[:, row]) for group, row in self.layout.rows]
        self.sampling = SamplingStage(self.ops, self.state, self.vocab_size)
        self.scoring = Scoring(self.ops, self.state)
        if self.kv_pool.is_cuda:
            self.round_steps()

    @property
    def block_size(self) -> int:
        """Number of tokens whose KV one block holds."""
        return int(self.kv_pool.shape[4])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingTokens | PendingMasks:
        """Launch a step. The work of later calls comes after it.

        Raises:
            IntegrityError: the previous step still waits for its masks.
        """
        if self._awaiting is not None:
            raise IntegrityError(f"step {self._awaiting.number} waits for masks")
        own_events = self._begin_step()
        if plan.copies:
            self._copy_blocks(plan.copies)
        if any(isinstance(work, Expect) for work in plan.kv):
            # Arriving KV may overwrite a block from which this plan copies: it waits for that, too.
            self._events.record(plan.number - 1, [self.mover.record_event()])
        self._group_events = []
        self._records_groups = any(isinstance(work, Export) for work in plan.kv)
        self.state.apply(plan)
        self.sampling.apply(plan)
        self.scoring.apply(plan)
        self.pooling.apply(plan)
        pending = self._launch(plan, own_events)
        if self._records_groups:
            is_complete = len(self._group_events) == len(self.layout.layer_groups)
            events = self._group_events if is_complete else [self.mover.record_event()]
            self._events.record(plan.number, events)
        return pending

    @torch.inference_mode()
    def sample(self, masks: GrammarMasks) -> None:
        """Launch the sampling of the step that awaits these masks.

        Raises:
            IntegrityError: another step waits, or none does.
        """
        pending, self._awaiting = self._awaiting, None
        if pending is None or pending.number != masks.number:
            raise IntegrityError(f"step {masks.number} does not wait for masks")
        self.sampling.set_masks(masks.masks, masks.skipped_rows)
        pending.tokens = self._sample(pending.number, pending.rows, pending.events)

    def _begin_step(self) -> StepEvents | None:
        return StepEvents(self._last_step) if self.kv_pool.is_cuda else None

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, targets = self.state.upload([list(side) for side in zip(*copies, strict=True)])
        words = as_words(self.kv_pool)  # torch on a CPU cannot copy rows of FP8 by index
        words.index_copy_(0, targets, words.index_select(0, sources))

    def _launch(self, plan: StepPlan, events: StepEvents | None) -> PendingTokens | PendingMasks:
        slots, chunks = plan.decodes, plan.chunks
        if not plan.has_rows:
            return PendingTokens(plan.number, torch.empty(0, dtype=torch.int64))
        rows = self._replay(slots, chunks) or self._run(slots, chunks)
        if plan.awaits_masks:
            self._awaiting = PendingMasks(plan.number, rows, events)
            return self._awaiting
        return self._sample(plan.number, rows, events)

    def _replay(self, slots: list[int], chunks: list[PrefillChunk]) -> LaunchedRows | None:
        """Run a step's forward by a CUDA graph, or return None if none covers it."""
        if not chunks:
            decodes = self.decode_graphs
            if decodes is None:
                return None
            decodes.forward(slots)
            return self._static_rows(slots)
        prefills = self.prefill_graphs
        if prefills is None or (shape := prefills.shape_of(len(slots), chunks)) is None:
            return None
        prefills.forward(HostStep(slots, chunks, self.block_size, self.state.host_tables), shape)
        if self._records_groups:
            self._group_events = prefills.events_of(shape)
        return self._static_rows([*slots, *_sampling_slots(chunks)])

    def _static_rows(self, slots: list[int]) -> LaunchedRows | None:
        """Return rows that a forward has left in static memory; None without CUDA graphs."""
        graphs = self.sampling_graphs
        return None if graphs is None else LaunchedRows(slots, partial(graphs.sample, len(slots)))

    def _sample(self, number: int, rows: LaunchedRows, events: StepEvents | None) -> PendingTokens:
        """Launch a step's sampling, and log probabilities if a device slot asks for them."""
        shaped = self.sampling.is_shaped(rows.slots)
        sampled = rows.sample(shaped)
        if self.scoring.of_tokens:
            logits = self.sampling.drawn_from(sampled, shaped)
            self.scoring.score_tokens(sampled, logits, rows.slots)
        scored, pooled = self.scoring.flush(), self.pooling.flush()
        pending = PendingTokens(number, sampled.tokens, [*scored, *pooled], events)
        self._last_step = events
        return pending

    def decode(self, slots: torch.Tensor, on_layer_end: OnLayerEnd | None = None) -> Forwarded:
        """Run the forward of a decode step of these device slots, [B] int64.

        Everything is read from and written to the device, so that this can be captured.
        """
        inputs = decode_inputs(self.state, slots, self.block_size)
        hidden = self.model.forward(inputs, self._layers, on_layer_end)
        # The padding device slot stays at position 0, because it runs in any number of steps.
        is_real = slots != self.state.padding_slot
        positions = torch.where(is_real, inputs.positions + 1, 0)
        return self._left(Forwarded(self._compute_logits(hidden), slots, positions))

    def run_chunks(self, inputs: StepInputs, on_layer_end: OnLayerEnd | None = None) -> Forwarded:
        """Run the forward of a step with prefill chunks; can be captured, too."""
        return self._forwarded(
            inputs, self._hidden_states(inputs, on_layer_end, inputs.sample_rows)
        )

    def _hidden_states(
        self, inputs: StepInputs, on_layer_end: OnLayerEnd | None, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the layers of a step with prefill chunks; returns [T, hidden], or only `rows`."""
        batch = inputs.forward_batch(self.state.block_tables)
        if inputs.num_decodes:
            decodes = decode_inputs(self.state, inputs.decode_slots, self.block_size)
            batch = joined(decodes, batch)
        return self.model.forward(batch, self._layers, on_layer_end, rows)

    def _forwarded(self, inputs: StepInputs, hidden: torch.Tensor) -> Forwarded:
        """Compute logits from the hidden states `[N, hidden]` of the rows that sample."""
        slots, positions = inputs.sample_slots, inputs.sample_positions
        if inputs.num_decodes:
            positions = torch.where(positions < 0, self.state.position[slots] + 1, positions)
        return self._left(Forwarded(self._compute_logits(hidden), slots, positions))

    def _left(self, forwarded: Forwarded) -> Forwarded:
        """Leave a forward's output where the CUDA graphs of sampling read it, if there are any."""
        return forwarded if self._static is None else self._static.copy_rows(forwarded)

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits; with CUDA graphs, into static memory that outlives the replay."""
        if not len(hidden):
            return hidden  # no row samples, so that nothing reads the logits
        out = None if self._static is None else self._static.logits[: len(hidden)]
        return self.model.compute_logits(hidden, out)

    def _run(self, slots: list[int], chunks: list[PrefillChunk]) -> LaunchedRows:
        """Launch the forward of decode rows and prefill chunks eagerly, in one pass."""
        state = self.state
        on_layer_end = self._event_recorder(self._group_events) if self._records_groups else None
        if chunks:
            step = HostStep(slots, chunks, self.block_size, state.host_tables)
            inputs = StepInputs.build(step, self.rounding).to(state.device)
            reads_all = any(chunk.reads_hidden_states for chunk in chunks)
            wanted = None if reads_all else inputs.sample_rows
            hidden = self._hidden_states(inputs, on_layer_end, wanted)
            if reads_all:
                self._read_prompts(hidden[len(slots) :], chunks)
                hidden = hidden[inputs.sample_rows]
            forwarded = self._forwarded(inputs, hidden)
        else:
            forwarded = self.decode(state.upload([self._rounded(slots)])[0], on_layer_end)
        rows = [*slots, *_sampling_slots(chunks)]
        return self._static_rows(rows) or LaunchedRows(
            rows, partial(self._sample_launched, forwarded, len(rows))
        )

    def _rounded(self, slots: list[int]) -> list[int]:
        """Return the device slots of decode rows, and of padding rows after them."""
        if self.rounding is None:
            return slots
        padding = self.rounding.rows_for(len(slots)) - len(slots)
        return slots + [self.rounding.padding_slot] * padding

    def _sample_launched(self, forwarded: Forwarded, count: int, shaped: bool) -> Sampled:
        return self.sampling.sample(forwarded, shaped).first(count)

    def _read_prompts(self, hidden: torch.Tensor, chunks: list[PrefillChunk]) -> None:
        """Launch the prompts' log probabilities and embeddings; `hidden` is [T, hidden]."""
        start = 0
        for index, chunk in enumerate(chunks):
            own = hidden[start : start + chunk.length]
            if chunk.pooling is not None:
                self.pooling.pool(index, chunk, own)
            if chunk.scored:
                self.scoring.score_prompt(index, chunk, own, self.model.compute_logits)
            start += chunk.length

    def _event_recorder(self, events: list[DeviceEvent], *, in_graph: bool = False) -> OnLayerEnd:
        """Return a callback that appends an event at the end of each layer group of a step."""
        ends = self.layout.last_layers()

        def record_group_end(layer: int) -> None:
            for _ in range(ends.count(layer)):
                events.append(self.mover.record_event(in_graph=in_graph))

        return record_group_end

    def _captured(self, inputs: StepInputs) -> list[DeviceEvent]:
        events: list[DeviceEvent] = []
        self.run_chunks(inputs, self._event_recorder(events, in_graph=True))
        return events

    def has_group_events(self, plan: int) -> bool:
        """Whether there is an event for each layer group of the blocks that this plan exports."""
        return self._events.has_group_events(plan)

    def pack(self, move: BlockMove, after: int) -> PendingMove:
        """Gather blocks into a staging buffer, as `BlockMoves` says."""
        return self.mover.pack(move, self._events.find(after, move.groups[-1]))

    def queue(self, work: Callable[[], object]) -> PendingMove:
        """Queue other work on the device after the moves so far."""
        return self.mover.queue(work)

    def fence(self) -> None:
        """Have later plans wait for the moves so far."""
        self.mover.fence()

    @torch.inference_mode()
    def warm_launch_path(self) -> None:
        """Do parts of a move and a launch, without effect, as `BlockMoves` says."""
        self.mover.warm_launch_path()
        self.state.apply_padding()
        PendingTokens(0, self.state.last_token[:1], events=self._begin_step())

    def unpack(self, move: BlockMove, after: int) -> PendingCheck:
        """Scatter a staging buffer into blocks, as `BlockMoves` says."""
        return self.mover.unpack(move, self._events.find(after, move.groups[-1]))

    def round_steps(self) -> None:
        """Pad steps that no CUDA graph replays, from now on."""
        sizes = batch_buckets(self.state.num_slots)
        self.rounding = Rounding(sizes, STEP_TOKENS, self.state.padding_slot)

    def capture_graphs(
        self,
        max_tokens: int,
        progress: Progress,
        make_pool: Callable[[torch.device, Progress], GraphPool] = GraphPool,
    ) -> None:
        """Capture the forward of decode steps and of steps with chunks, and sampling.

        Args:
            max_tokens: most tokens of a step, decode rows included.
            progress: called with a name of each.
            make_pool: makes what captures them.
        """
        state = self.state
        self.round_steps()  # such a step leaves padding rows after its own
        rows = self._allocate_static()
        pool = make_pool(state.device, progress)
        sizes = batch_buckets(state.num_slots)
        decodes = DecodeGraphs.capture(self.decode, sizes, state.padding_slot, pool)
        prefills = PrefillGraphs.capture(
            self._captured,
            step_shapes(max_tokens, state.num_slots, state.max_blocks * self.block_size),
            self.block_size,
            state.padding_slot,
            state.num_groups,
            pool,
        )
        self.sampling_graphs = SamplingGraphs.capture(
            lambda count, shaped: self.sampling.sample(rows.first(count), shaped),
            sizes,
            rows,
            pool,
        )
        self.decode_graphs, self.prefill_graphs = decodes, prefills

    @torch.inference_mode()
    def _allocate_static(self) -> StaticRows:
        """Allocate static rows; run a step, so that one-time allocations precede the capture."""
        state = self.state
        every = torch.full((state.num_slots,), state.padding_slot, device=state.device)
        rows = self.decode(every)
        for shaped in (False, True):
            self.sampling.sample(rows, shaped)
        self._static = StaticRows.allocate(rows.logits, state.num_slots, state.padding_slot)
        return self._static


def _sampling_slots(chunks: list[PrefillChunk]) -> list[int]:
    return [chunk.slot for chunk in chunks if chunk.samples]
