"""Write keys and values into their paged slots, in plain torch."""

from __future__ import annotations

import torch


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write a step's keys and values into their slots; slot -1 is skipped.

    Shapes are those of `pagewire.kernels.ReshapeAndCache`.
    """
    block_size = k_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = key[kept]
    v_cache[blocks, :, offsets] = value[kept]
