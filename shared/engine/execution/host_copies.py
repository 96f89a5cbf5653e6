"""Copies of tensors between host and device that nobody waits for."""

from __future__ import annotations

import torch


def uploaded(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Launch a copy to the device: from pageable memory, this would wait for it."""
    source = host.pin_memory() if device.type == "cuda" else host
    return source.to(device, non_blocking=True)


def downloaded(tensor: torch.Tensor) -> torch.Tensor:
    """Launch a copy to the host, in page-locked memory; a later event shows that it is complete."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
