"""Runs scheduled batches on one device: builds the inputs, launches the model, samples.

`execute` only launches. The tokens come back through pinned memory and are read a step later, so
that the host prepares the next step while the device runs this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pagewire.kernels import Ops
from pagewire.shared.engine.block_mover import BlockMover, PendingCheck, PendingMove
from pagewire.shared.engine.cuda_graph import (
    DecodeGraphs,
    GraphPool,
    Marker,
    PrefillGraphs,
    batch_buckets,
    prefill_shapes,
)
from pagewire.shared.engine.device_state import DeviceState
from pagewire.shared.engine.prefill_inputs import PrefillInputs
from pagewire.shared.engine.scheduler import ScheduledBatch, ScheduledTokens
from pagewire.shared.engine.sequence import Sequence
from pagewire.shared.model.inputs import BehindLayer, ForwardBatch


class CausalLM(Protocol):
    """What the runner needs of a model."""

    def forward(
        self, batch: ForwardBatch, kv_pool: torch.Tensor, behind_layer: BehindLayer | None = None
    ) -> torch.Tensor:
        """Return the final hidden states [T, hidden]; writes the step's KV."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [N, vocab] logits of [N, hidden] states."""
        ...


class PendingTokens:
    """Tokens of a launched step, on their way to the host."""

    __slots__ = ("_event", "_host")

    def __init__(self, tokens: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tokens
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        """Whether the tokens are here, without waiting."""
        return self._event is None or self._event.query()

    def wait(self) -> list[int]:
        """Wait for the step and return one token for each sampled part of its batch."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


class Executor(Protocol):
    """Seam between the engine and the device(s) it drives.

    Attributes:
        marks_parts: whether steps mark the ends of the parts of the blocks that they write, as
            far as they can; set by whoever packs.
    """

    marks_parts: bool

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        """Launch a step."""
        ...

    def introduce(self, sequence: Sequence) -> None:
        """Bring to the device what is known of a sequence that has a slot and will run."""
        ...

    def mark(self) -> Marker:
        """Return the present end of the launched work."""
        ...

    def part_markers(self) -> list[Marker]:
        """Return where in the step launched last each part of its blocks is final.

        Empty if nothing but the step's end is known.
        """
        ...

    def pack(
        self, block_ids: list[int], parts: range, staging: torch.Tensor, seed: int, after: Marker
    ) -> PendingMove:
        """Gather blocks into staging, beside the steps, behind those launched at the marker."""
        ...

    def unpack(
        self, staging: torch.Tensor, block_ids: list[int], parts: range, seed: int, after: Marker
    ) -> PendingCheck:
        """Scatter staging into blocks, likewise."""
        ...


@dataclass(slots=True)
class ModelRunner:
    """The executor of one process with one device.

    Attributes:
        kv_pool: [NB, L, 2, KH, BS, D].
        decode_graphs, prefill_graphs: steps as CUDA graphs, if there are any.
        mover: moves blocks of the pool.
        marks_parts: see `Executor`.
    """

    model: CausalLM
    ops: Ops
    kv_pool: torch.Tensor
    state: DeviceState
    decode_graphs: DecodeGraphs | None = None
    prefill_graphs: PrefillGraphs | None = None
    mover: BlockMover = field(init=False)
    marks_parts: bool = False
    _part_markers: list[Marker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mover = BlockMover(self.ops, self.kv_pool)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return int(self.kv_pool.shape[4])

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        """Launch a step. Later calls' work is ordered behind it."""
        self._part_markers = []
        self.state.sync(batch)
        slots = [part.sequence.slot or 0 for part in batch.decodes]
        tokens = self._replay(slots, batch.prefills)
        if tokens is not None:
            return PendingTokens(tokens)
        if not batch.prefills:
            return PendingTokens(self.decode(self.state.upload([slots])[0]))
        return PendingTokens(self._run_mixed(slots, batch))

    @torch.inference_mode()
    def introduce(self, sequence: Sequence) -> None:
        """Bring what is known of a sequence to its slot, so that its first step need not."""
        self.state.introduce([sequence])

    def _replay(self, slots: list[int], chunks: list[ScheduledTokens]) -> torch.Tensor | None:
        """Run a step by CUDA graphs, or return None if there are none for all of it.

        Decode rows beside small chunks take two graphs: to read the weights twice is quicker than
        to launch every kernel. The decode's tokens must survive the prefill's replay, and they do,
        being alive when the prefill graphs were captured in the same memory.
        """
        tokens = []
        shape = None
        if slots and (self.decode_graphs is None or not self.decode_graphs.fits(len(slots))):
            return None
        if chunks:
            if self.prefill_graphs is not None:
                shape = self.prefill_graphs.shape_of(chunks, beside_decodes=bool(slots))
            if shape is None:
                return None
        if slots and self.decode_graphs is not None:
            tokens.append(self.decode_graphs.replay(slots))
        if shape is not None and self.prefill_graphs is not None:
            tokens.append(self.prefill_graphs.replay(chunks, shape))
            if self.marks_parts:
                self._part_markers = self.prefill_graphs.markers_of(shape)
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens)

    def decode(self, slots: torch.Tensor) -> torch.Tensor:
        """Run one decode step of these slots, [B] int64, and return the tokens, [B] int64.

        Everything is read from and written to the device, so that this can be captured.
        """
        inputs = self._decode_inputs(slots)
        hidden = self.model.forward(inputs, self.kv_pool)
        # The padding slot stays at position 0: it runs in many more steps than a sequence does.
        is_real = slots != self.state.padding_slot
        return self._sample(hidden, slots, torch.where(is_real, inputs.positions + 1, 0))

    def prefill(
        self, inputs: PrefillInputs, behind_layer: BehindLayer | None = None
    ) -> torch.Tensor:
        """Run a step of prefill chunks alone and return the tokens of those that sample.

        Everything is read from and written to the device, so that this can be captured.
        """
        forward = inputs.forward_batch(self.state.block_tables)
        hidden = self.model.forward(forward, self.kv_pool, behind_layer)
        if inputs.num_samples == 0:
            # On the device all the same: a step is waited for by its tokens.
            return inputs.sample_slots
        return self._sample(hidden[inputs.rows], inputs.sample_slots, inputs.sample_positions)

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

    def _run_mixed(self, slots: list[int], batch: ScheduledBatch) -> torch.Tensor:
        """Run decode rows, if any, and prefill chunks in one pass; returns the tokens."""
        inputs = PrefillInputs.build(batch.prefills, self.block_size).to(self.state.device)
        behind_layer = self._marking(self._part_markers) if self.marks_parts else None
        if not slots:
            return self.prefill(inputs, behind_layer)
        decode_slots = self.state.upload([slots])[0]
        decodes = self._decode_inputs(decode_slots)
        forward = _joined(decodes, inputs.forward_batch(self.state.block_tables))
        decode_rows = torch.arange(len(slots), device=self.state.device)
        rows = torch.cat([decode_rows, inputs.rows + len(slots)])
        hidden = self.model.forward(forward, self.kv_pool, behind_layer)
        return self._sample(
            hidden[rows],
            torch.cat([decode_slots, inputs.sample_slots]),
            torch.cat([decodes.positions + 1, inputs.sample_positions]),
        )

    def _sample(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Draw a token a row of `hidden` [B, hidden] and leave it in its slot."""
        state = self.state
        tokens = self.ops.sample(
            self.model.compute_logits(hidden),
            state.temperature[slots],
            state.top_k[slots],
            state.top_p[slots],
            state.seeds[slots],
            positions,
        )
        state.last_token.index_copy_(0, slots, tokens)
        state.position.index_copy_(0, slots, positions)
        return tokens

    def mark(self) -> Marker:
        """Return the present end of the launched work."""
        return self.mover.mark()

    def part_markers(self) -> list[Marker]:
        """Return where in the step launched last each part of its blocks is final, if known."""
        # A step that failed to launch may have marked some.
        is_complete = len(self._part_markers) == self.mover.parts.count
        return self._part_markers if is_complete else []

    def _marking(self, markers: list[Marker], *, in_graph: bool = False) -> BehindLayer:
        """Return what notes the ends of the parts in a list as a step is launched."""
        layers_per_part = self.kv_pool.shape[1] // self.mover.parts.count

        def mark_part_end(layer: int) -> None:
            if (layer + 1) % layers_per_part == 0:
                markers.append(self.mover.mark(in_graph=in_graph))

        return mark_part_end

    def _captured_prefill(self, inputs: PrefillInputs, markers: list[Marker]) -> torch.Tensor:
        markers.clear()  # a step is run before it is captured
        return self.prefill(inputs, self._marking(markers, in_graph=True))

    def pack(
        self, block_ids: list[int], parts: range, staging: torch.Tensor, seed: int, after: Marker
    ) -> PendingMove:
        """Gather blocks into a staging buffer, beside the steps launched behind the marker."""
        return self.mover.pack(block_ids, parts, staging, seed, after)

    def unpack(
        self, staging: torch.Tensor, block_ids: list[int], parts: range, seed: int, after: Marker
    ) -> PendingCheck:
        """Scatter a staging buffer into blocks, beside the steps launched behind the marker."""
        return self.mover.unpack(staging, block_ids, parts, seed, after)

    def capture_graphs(self, max_tokens: int, progress: Callable[[str], None]) -> None:
        """Capture decode steps, and prefill steps of up to `max_tokens`; `progress` hears each."""
        state = self.state
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
