"""What a running sequence needs on the device from step to step, in slots.

A decode batch is a list of slots: the next input token, its position, the block table and the
sampling parameters are read there, and the sampled token is written there, so that step n + 1 can
be launched before the host knows the tokens of step n. One more slot than sequences: padding rows
of a CUDA graph's batch use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagewire.shared.engine.prefill_inputs import BlockTables
from pagewire.shared.engine.step import NewSlot, SlotBlocks, SlotInput, StepPlan
from pagewire.shared.sampling import ResolvedSampling


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter, which has a tensor with an entry for each slot.

    Attributes:
        default: of slots that nobody has.
        of: takes it out of a request's parameters.
    """

    name: str
    dtype: torch.dtype
    default: float
    of: Callable[[ResolvedSampling], float]


# By the names that `kernels.Sample` has for them.
PARAMETERS = (
    Parameter("temperature", torch.float32, 0.0, lambda params: params.temperature),
    Parameter("top_k", torch.int32, 0, lambda params: params.top_k),
    Parameter("top_p", torch.float32, 1.0, lambda params: params.top_p),
    Parameter("seeds", torch.int64, 0, lambda params: params.seed or 0),
)
_WHOLE = tuple(p for p in PARAMETERS if not p.dtype.is_floating_point)
_REAL = tuple(p for p in PARAMETERS if p.dtype.is_floating_point)


@dataclass(slots=True)
class DeviceState:
    """The slots' tensors, and a copy of the block tables on the host.

    Attributes:
        last_token: [S + 1] int64, input of the next decode step.
        position: [S + 1] int64, of that token.
        block_tables: [S + 1, max_blocks] int32.
        host_tables: [S + 1, max_blocks] int64, the same on the host.
        parameters: by name, [S + 1] each; see `PARAMETERS`.
    """

    num_slots: int
    max_blocks: int
    device: torch.device
    last_token: torch.Tensor = field(init=False)
    position: torch.Tensor = field(init=False)
    block_tables: torch.Tensor = field(init=False)
    host_tables: BlockTables = field(init=False)
    parameters: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        rows = self.num_slots + 1

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.last_token = zeros(rows, dtype=torch.int64)
        self.position = zeros(rows, dtype=torch.int64)
        self.block_tables = zeros(rows, self.max_blocks, dtype=torch.int32)
        self.parameters = {
            p.name: torch.full((rows,), p.default, dtype=p.dtype, device=self.device)
            for p in PARAMETERS
        }
        self.host_tables = np.zeros((rows, self.max_blocks), np.int64)

    @property
    def padding_slot(self) -> int:
        """The slot of rows that stand for no sequence."""
        return self.num_slots

    def apply(self, plan: StepPlan) -> None:
        """Bring the slots up to date: new owners' parameters, new blocks, inputs."""
        if plan.new_slots:
            self._set_parameters(plan.new_slots)
        if plan.blocks:
            self._add_blocks(plan.blocks)
        if plan.inputs:
            self._put_inputs(plan.inputs)

    def upload(self, rows: list[list[int]] | BlockTables) -> torch.Tensor:
        """Copy equally long rows of integers to the device without waiting: [len(rows), n]."""
        return self._to_device(np.asarray(rows, np.int64))

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(array)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def _add_blocks(self, additions: list[SlotBlocks]) -> None:
        index: list[int] = []
        blocks: list[int] = []
        for more in additions:
            first = more.slot * self.max_blocks + more.first
            index.extend(range(first, first + len(more.block_ids)))
            blocks.extend(more.block_ids)
        rows = np.array([index, blocks], np.int64)
        self.host_tables.reshape(-1)[rows[0]] = rows[1]
        update = self.upload(rows)
        self.block_tables.view(-1).index_copy_(0, update[0], update[1].to(torch.int32))

    def _put_inputs(self, inputs: list[SlotInput]) -> None:
        rows = [[put.slot, put.token, put.position] for put in inputs]
        slots, tokens, positions = self.upload([list(row) for row in zip(*rows, strict=True)])
        self.last_token.index_copy_(0, slots, tokens)
        self.position.index_copy_(0, slots, positions)

    def sampling(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters of these slots, [B] int64, as `kernels.Sample` takes them."""
        return {name: tensor[slots] for name, tensor in self.parameters.items()}

    def _set_parameters(self, newcomers: list[NewSlot]) -> None:
        def values(parameters: tuple[Parameter, ...]) -> list[list[float]]:
            return [[p.of(new.sampling) for new in newcomers] for p in parameters]

        # One copy for the slots and all integers, one for the rest: each costs the first token.
        slots = [new.slot for new in newcomers]
        index, *whole = self._to_device(np.array([slots, *values(_WHOLE)], np.int64))
        real = self._to_device(np.array(values(_REAL), np.float32))
        for parameter, column in zip((*_WHOLE, *_REAL), (*whole, *real), strict=True):
            tensor = self.parameters[parameter.name]
            tensor.index_copy_(0, index, column.to(parameter.dtype))
