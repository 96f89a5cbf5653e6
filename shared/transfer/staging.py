"""Staging: the bounded memory from which KV blocks are sent, and into which they are received."""

from __future__ import annotations

from collections import deque

import torch

from pagewire.shared.base.errors import IntegrityError
from pagewire.shared.transfer.device_memory import allocate

_ALIGNMENT = 256  # of each staging slot: what kernels are quickest with


class Staging:
    """Equal staging slots in one allocation. One thread uses them.

    Attributes:
        memory: the allocation, uint8 [num_slots, slot_bytes and what aligns the next one].
        slot_bytes: size of each.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        """Use memory that others may write to; see `make_staging`."""
        self.memory, self.slot_bytes = memory, slot_bytes
        self.buffers = list(memory[:, :slot_bytes])
        self._free = deque(range(memory.shape[0]))

    @property
    def num_slots(self) -> int:
        """How many staging slots there are."""
        return len(self.buffers)

    @property
    def num_free(self) -> int:
        """How many staging slots are free."""
        return len(self._free)

    def acquire(self) -> int:
        """Take the staging slot that has been free longest. One must be free."""
        return self._free.popleft()

    def release(self, slot: int) -> None:
        """Release a staging slot.

        Raises:
            IntegrityError: it is free already.
        """
        if slot in self._free:
            raise IntegrityError(f"staging slot {slot} was released twice")
        self._free.append(slot)


def make_staging(num_slots: int, slot_bytes: int, device: torch.device) -> Staging:
    """Allocate staging.

    Raises:
        ConfigError: there is no room for it.
    """
    stride = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
    return Staging(allocate((num_slots, stride), device), slot_bytes)
