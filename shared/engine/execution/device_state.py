"""Device slots: what a running sequence needs on the device from step to step.

A decode batch is a list of device slots. A step reads the next input token, its position, the block
table and the sampling parameters there, and writes the sampled token there. So step n + 1 can be
launched before the host knows the tokens of step n. There is one more device slot than sequences,
for the padding rows of a CUDA graph's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pagewire.shared.engine.execution.host_copies import uploaded
from pagewire.shared.engine.execution.step_inputs import BlockTables
from pagewire.shared.engine.scheduling.step import (
    DecodeInput,
    NewDeviceSlot,
    StepPlan,
    TableEntries,
)
from pagewire.shared.request.sampling import RequestSpec


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter, which has a tensor with an entry for each device slot.

    Attributes:
        default: value in device slots without an owner.
        of: returns the value from a request's parameters.
    """

    name: str
    dtype: torch.dtype
    default: float
    of: Callable[[RequestSpec], float]


# By the names that `kernels.Sample` has for them.
PARAMETERS = (
    Parameter("temperature", torch.float32, 0.0, lambda params: params.temperature),
    Parameter("top_k", torch.int32, 0, lambda params: params.top_k),
    Parameter("top_p", torch.float32, 1.0, lambda params: params.top_p),
    Parameter("min_p", torch.float32, 0.0, lambda params: params.min_p),
    Parameter("seeds", torch.int64, 0, lambda params: params.seed or 0),
)

_Words = npt.NDArray[np.int64]
_PADDING = RequestSpec(max_tokens=1, temperature=0.0)


@dataclass(slots=True)
class DeviceState:
    """The device slots' tensors, and a copy of the block tables on the host.

    Attributes:
        last_token: [S + 1] int64, input of the next decode step.
        position: [S + 1] int64, of that token.
        max_blocks: most blocks of a sequence in one cache group.
        num_groups: G, cache groups.
        block_tables: [S + 1, G, max_blocks] int32.
        host_tables: [S + 1, G, max_blocks] int64, the same on the host.
        parameters: by name, [S + 1] each; see `PARAMETERS`.
    """

    num_slots: int
    max_blocks: int
    device: torch.device
    num_groups: int = 1
    last_token: torch.Tensor = field(init=False)
    position: torch.Tensor = field(init=False)
    block_tables: torch.Tensor = field(init=False)
    host_tables: BlockTables = field(init=False)
    parameters: dict[str, torch.Tensor] = field(init=False)
    _all_tables: torch.Tensor = field(init=False)  # [1, (S + 1) * G * max_blocks]
    _inputs: torch.Tensor = field(init=False)  # [2, S + 1] int64: last_token, position
    _parameters: torch.Tensor = field(init=False)  # [P, S + 1] int64, of which some use a half

    def __post_init__(self) -> None:
        rows, device = self.num_slots + 1, self.device
        self._inputs = torch.zeros((2, rows), dtype=torch.int64, device=device)
        self.last_token, self.position = self._inputs
        shape = (rows, self.num_groups, self.max_blocks)
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._all_tables = self.block_tables.view(1, -1)
        self.host_tables = np.zeros(shape, np.int64)
        self._parameters = torch.zeros((len(PARAMETERS), rows), dtype=torch.int64, device=device)
        self.parameters = {}
        for parameter, words in zip(PARAMETERS, self._parameters, strict=True):
            self.parameters[parameter.name] = _as_type(words, parameter.dtype)
            self.parameters[parameter.name].fill_(parameter.default)

    @property
    def padding_slot(self) -> int:
        """The device slot of rows that stand for no sequence."""
        return self.num_slots

    def apply(self, plan: StepPlan) -> None:
        """Bring the device slots up to date: new owners' parameters, new blocks, inputs.

        Each copy and each kernel delays the first token, so there are as few as possible.
        """
        updates: list[tuple[torch.Tensor, _Words]] = []  # [R, n], and [1 + R, m]: where, and what
        if plan.new_slots:
            updates.append((self._parameters, _words_of_parameters(plan.new_slots)))
        if plan.blocks:
            updates.append((self._all_tables, self._enter_blocks(plan.blocks)))
        if plan.inputs:
            rows = [(put.slot, put.token, put.position) for put in plan.inputs]
            updates.append((self._inputs, np.array([*zip(*rows, strict=True)], np.int64)))
        arrays = self._upload_all([words for _, words in updates])
        for (target, _), words in zip(updates, arrays, strict=True):
            target.index_copy_(1, words[0], _as_type(words[1:], target.dtype))

    def apply_padding(self) -> None:
        """Bring the padding device slot up to date, as for a new sequence; it stays as it is."""
        slot = self.padding_slot
        plan = StepPlan(
            number=0,
            new_slots=[NewDeviceSlot(slot, _PADDING)],
            blocks=TableEntries([slot], [0], [0]),
            inputs=[DecodeInput(slot, 0, 0)],
        )
        self.apply(plan)

    def upload(
        self, rows: Sequence[int] | list[list[int]] | npt.NDArray[np.generic]
    ) -> torch.Tensor:
        """Copy integers, such as [len(rows), n] of lists, to the device without waiting."""
        array = rows if isinstance(rows, np.ndarray) else np.array(rows, np.int64)
        return uploaded(torch.from_numpy(array), self.device)

    def _upload_all(self, arrays: list[_Words]) -> list[torch.Tensor]:
        """Copy arrays of any shapes to the device at once."""
        if len(arrays) < 2:
            return [self.upload(array) for array in arrays]
        flat = self.upload(np.concatenate([array.ravel() for array in arrays]))
        parts = flat.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def _enter_blocks(self, entries: TableEntries) -> _Words:
        """Write blocks into the host's tables; return the same entries for the device, [2, n]."""
        columns = np.array([entries.slots, entries.block_ids, entries.positions], np.int64)
        index = columns[0]
        index *= self.num_groups * self.max_blocks
        index += columns[2]
        self.host_tables.reshape(-1)[index] = columns[1]
        return columns[:2]

    def sampling(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters of device slots, [B] int64, as `kernels.Sample` takes them."""
        found = self._parameters.index_select(1, slots)  # all in one launch
        return {
            parameter.name: _as_type(words, parameter.dtype)
            for parameter, words in zip(PARAMETERS, found, strict=True)
        }


def _words_of_parameters(newcomers: list[NewDeviceSlot]) -> _Words:
    """Return device slots and the bits of their parameters, [1 + P, n]."""
    words = np.empty((1 + len(PARAMETERS), len(newcomers)), np.int64)
    words[0] = [new.slot for new in newcomers]
    for row, parameter in enumerate(PARAMETERS, start=1):
        values = [parameter.of(new.spec) for new in newcomers]
        is_real = parameter.dtype.is_floating_point
        words[row] = np.array(values, np.float32).view(np.int32) if is_real else values
    return words


def _as_type(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of 64-bit words, each of which holds a number; 32-bit ones in the low half."""
    return words if dtype == torch.int64 else words.view(dtype)[..., ::2]
