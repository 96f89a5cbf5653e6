"""Staging: the bounded memory from which KV blocks are sent, and into which they are received."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagewire.shared.kv.device_memory import allocate

_ALIGNMENT = 256  # of each staging slot: what kernels are quickest with


class Staging:
    """Equal staging slots in one allocation; `StagingSlots` says who may use each.

    Attributes:
        memory: the allocation, uint8 [num_slots, slot_bytes and what aligns the next one].
        slot_bytes: size of each.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        """Use memory that others may write to; see `make_staging`."""
        self.memory, self.slot_bytes = memory, slot_bytes
        self.buffers = list(memory[:, :slot_bytes])

    @property
    def num_slots(self) -> int:
        """How many staging slots there are."""
        return len(self.buffers)


def make_staging(
    num_slots: int,
    slot_bytes: int,
    device: torch.device,
    shared: Callable[[int], torch.Tensor] | None = None,
) -> Staging:
    """Allocate the memory of a worker's staging slots.

    Args:
        num_slots: number of staging slots.
        slot_bytes: size of each.
        device: where it is.
        shared: returns this many bytes that all ranks of the model share; None with one rank.

    Raises:
        ConfigError: it cannot be allocated.
    """
    stride = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
    if shared is not None:
        return Staging(shared(num_slots * stride).view(num_slots, stride), slot_bytes)
    return Staging(allocate((num_slots, stride), device), slot_bytes)
