"""The staging slots of KV transfer, in memory that all ranks of a model have.

On CPUs that is a file without a name. On GPUs it is rank 0's memory, so that all transports copy
from and to it as with one rank; the other ranks map it.
"""

from __future__ import annotations

import mmap
import os

import torch

from pagewire.shared.base.errors import ConfigError, TransferError
from pagewire.shared.engine.ranks.messages import Stage
from pagewire.shared.kv.device_memory import allocate, export_handle, mapped


def allocate_shared(fd: int, num_bytes: int, device: torch.device) -> tuple[torch.Tensor, Stage]:
    """Return new memory, uint8 `[num_bytes]`, and the command by which other ranks map it.

    Args:
        fd: an empty file that all ranks have open.
        num_bytes: its size.
        device: rank 0's.

    Raises:
        ConfigError: it cannot be allocated, or not be mapped by others.
    """
    try:
        if device.type == "cuda":
            memory = allocate((num_bytes,), device)
            return memory, Stage(num_bytes, export_handle(memory))
        os.ftruncate(fd, num_bytes)
        return _mapped_file(fd, num_bytes), Stage(num_bytes)
    except (OSError, TransferError) as exc:
        raise ConfigError(f"cannot allocate {num_bytes >> 20} MiB for KV staging: {exc}") from exc


def map_shared(command: Stage, fd: int, device: torch.device) -> torch.Tensor:
    """Return the memory of rank 0, uint8; it stays mapped while the tensor or the process lives.

    Raises:
        TransferError: this rank's device cannot map it.
    """
    if command.handle:
        return mapped(command.handle, command.num_bytes, device)
    return _mapped_file(fd, command.num_bytes)


def _mapped_file(fd: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
