"""Steps that are padded and cut in two as CUDA graphs are, without CUDA."""

from __future__ import annotations

import torch

from pagewire.shared.engine.execution.cuda_graph import DecodeGraphs, PrefillGraphs, prefill_shapes
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.execution.prefill_inputs import BlockTables, PrefillShape
from pagewire.shared.engine.execution.sampling_stage import Forwarded, Sampled
from pagewire.shared.engine.scheduling.step import PrefillChunk


class PaddedSteps(DecodeGraphs):
    """Runs decode steps padded as CUDA graphs are, without CUDA."""

    runner: ModelRunner
    rows: Forwarded

    def forward(self, slots: list[int]) -> None:
        size = next(size for size in self.sizes if size >= len(slots))
        padded = slots + [self.padding_slot] * (size - len(slots))
        self.rows = self.runner.decode(torch.tensor(padded))

    def sample(self, num_rows: int, shaped: bool) -> Sampled:
        return self.runner.sampling.sample(self.rows, shaped=shaped).first(num_rows)


class PaddedPrefills(PrefillGraphs):
    """Likewise prefill steps."""

    runner: ModelRunner
    rows: Forwarded

    def forward(self, chunks: list[PrefillChunk], shape: PrefillShape, tables: BlockTables) -> None:
        self.rows = self.runner.prefill(self._padded(chunks, shape, tables))
        assert self.rows.slots.shape == (shape.num_chunks,)

    def sample(self, shape: PrefillShape, num_rows: int, shaped: bool) -> Sampled:
        sampling = self.runner.sampling
        first = sampling.first_prefill_row
        return sampling.sample(self.rows, shaped=shaped, first_row=first).first(num_rows)


def run_padded(runner: ModelRunner) -> None:
    """Let a runner's steps run as if they were captured."""
    padding_slot = runner.state.padding_slot
    sizes = [2, 8, min(48, runner.state.num_slots)]
    decodes = PaddedSteps(sizes, torch.empty(0), padding_slot)
    prefills = PaddedPrefills(
        prefill_shapes(2048, 8), runner.block_size, padding_slot, len(runner.groups)
    )
    decodes.runner = prefills.runner = runner
    runner.decode_graphs, runner.prefill_graphs = decodes, prefills
