"""Steps that are padded and cut in two as CUDA graphs are, without CUDA."""

from __future__ import annotations

import torch

from pagewire.shared.engine.execution.cuda_graph import DecodeGraphs, PrefillGraphs, step_shapes
from pagewire.shared.engine.execution.model_runner import ModelRunner
from pagewire.shared.engine.execution.sampling_stage import Forwarded, Sampled
from pagewire.shared.engine.execution.step_inputs import BlockTables, StepShape
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
    """Likewise steps with prefill chunks."""

    runner: ModelRunner
    rows: Forwarded

    def forward(
        self,
        decodes: list[int],
        chunks: list[PrefillChunk],
        shape: StepShape,
        tables: BlockTables,
    ) -> None:
        self.rows = self.runner.run_chunks(self._padded(decodes, chunks, shape, tables))
        assert self.rows.slots.shape == (shape.num_samples,)

    def sample(self, shape: StepShape, num_rows: int, shaped: bool) -> Sampled:
        return self.runner.sampling.sample(self.rows, shaped=shaped).first(num_rows)


def run_padded(runner: ModelRunner) -> None:
    """Let a runner's steps run as if they were captured."""
    padding_slot = runner.state.padding_slot
    sizes = [2, 8, min(48, runner.state.num_slots)]
    decodes = PaddedSteps(sizes, torch.empty(0), padding_slot)
    shapes = step_shapes(2048, sizes[-1])
    prefills = PaddedPrefills(shapes, runner.block_size, padding_slot, len(runner.groups))
    decodes.runner = prefills.runner = runner
    runner.decode_graphs, runner.prefill_graphs = decodes, prefills
