"""What a running sequence needs on the device from step to step, in slots.

A decode batch is a list of slots: the next input token, its position, the block table and the
sampling parameters are read there, and the sampled token is written there, so that step n + 1 can
be launched before the host knows the tokens of step n. One more slot than sequences: padding rows
of a CUDA graph's batch use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagewire.shared.engine.scheduler import ScheduledBatch
from pagewire.shared.engine.sequence import Sequence


@dataclass(slots=True)
class DeviceState:
    """The slots' tensors and what the host knows of their content.

    Attributes:
        last_token: [S + 1] int64, input of the next decode step.
        position: [S + 1] int64, of that token.
        block_tables: [S + 1, max_blocks] int32.
        temperature, top_k, top_p, seeds: [S + 1], as `kernels.Sample` takes them.
    """

    num_slots: int
    max_blocks: int
    device: torch.device
    last_token: torch.Tensor = field(init=False)
    position: torch.Tensor = field(init=False)
    block_tables: torch.Tensor = field(init=False)
    temperature: torch.Tensor = field(init=False)
    top_k: torch.Tensor = field(init=False)
    top_p: torch.Tensor = field(init=False)
    seeds: torch.Tensor = field(init=False)
    _owners: list[tuple[Sequence, int] | None] = field(init=False)
    _synced_blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        rows = self.num_slots + 1

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.last_token = zeros(rows, dtype=torch.int64)
        self.position = zeros(rows, dtype=torch.int64)
        self.block_tables = zeros(rows, self.max_blocks, dtype=torch.int32)
        self.temperature = zeros(rows, dtype=torch.float32)
        self.top_k = zeros(rows, dtype=torch.int32)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=self.device)
        self.seeds = zeros(rows, dtype=torch.int64)
        self._owners = [None] * rows
        self._synced_blocks = [0] * rows

    @property
    def padding_slot(self) -> int:
        """The slot of rows that stand for no sequence."""
        return self.num_slots

    def sync(self, batch: ScheduledBatch) -> None:
        """Bring the slots of a batch up to date: new owners' parameters, inputs, new blocks."""
        self.introduce([part.sequence for part in batch])
        inputs = [
            (part.sequence.slot, part.input_token, part.start)
            for part in batch.decodes
            if part.sequence.slot is not None and part.input_token is not None
        ]
        if inputs:
            slots, tokens, positions = self.upload([list(row) for row in zip(*inputs, strict=True)])
            self.last_token.index_copy_(0, slots, tokens)
            self.position.index_copy_(0, slots, positions)

    def introduce(self, sequences: list[Sequence]) -> None:
        """Bring what is known of sequences before they run: parameters, blocks so far."""
        newcomers: list[Sequence] = []
        flat_index: list[int] = []
        blocks: list[int] = []
        for sequence in sequences:
            slot = sequence.slot
            if slot is None:
                continue
            if self._owners[slot] != (sequence, sequence.num_preemptions):
                self._owners[slot] = (sequence, sequence.num_preemptions)
                self._synced_blocks[slot] = 0
                newcomers.append(sequence)
            known, have = self._synced_blocks[slot], len(sequence.block_ids)
            if known < have:
                base = slot * self.max_blocks
                flat_index.extend(range(base + known, base + have))
                blocks.extend(sequence.block_ids[known:])
                self._synced_blocks[slot] = have
        if newcomers:
            self._set_parameters(newcomers)
        if blocks:
            update = self.upload([flat_index, blocks])
            self.block_tables.view(-1).index_copy_(0, update[0], update[1].to(torch.int32))

    def upload(self, rows: list[list[int]]) -> torch.Tensor:
        """Copy equally long rows of integers to the device without waiting: [len(rows), n]."""
        host = torch.tensor(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    def _set_parameters(self, sequences: list[Sequence]) -> None:
        params = [sequence.sampling for sequence in sequences]
        slots = [sequence.slot or 0 for sequence in sequences]
        whole = self.upload([slots, [p.top_k for p in params], [p.seed or 0 for p in params]])
        host = torch.tensor(
            [[p.temperature for p in params], [p.top_p for p in params]],
            dtype=torch.float32,
            pin_memory=self.device.type == "cuda",
        )
        real = host.to(self.device, non_blocking=True)
        index = whole[0]
        self.top_k.index_copy_(0, index, whole[1].to(torch.int32))
        self.seeds.index_copy_(0, index, whole[2])
        self.temperature.index_copy_(0, index, real[0])
        self.top_p.index_copy_(0, index, real[1])
