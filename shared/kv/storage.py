"""Allocates the paged KV tensors, block-major, in one allocation."""

from __future__ import annotations

import torch

from pagewire.shared.base.errors import ConfigError
from pagewire.shared.kv.kv_layout import KvLayout


def allocate_pool(layout: KvLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Allocate a pool `[NB, L, N, KH, BS, D]`, zeroed: a masked lane never reads a NaN.

    Raises:
        ConfigError: the device has not that much memory.
    """
    shape, dtype = (num_blocks, *layout.block_shape), getattr(torch, layout.dtype)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as exc:  # on CUDA its subclass OutOfMemoryError
        size = num_blocks * layout.block_bytes / 2**30
        raise ConfigError(
            f"no memory for {num_blocks} KV blocks ({size:.1f} GiB) on {device}: "
            "lower --num-blocks or --gpu-memory-utilization"
        ) from exc
