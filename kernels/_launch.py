"""What the launchers share: shape checks and facts about the device.

Launchers never wait for the device and never branch on a tensor's values, so that a captured CUDA
graph replays with any metadata. They launch on the current device: it must be the tensors' own.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from pagewire.kernels.errors import UnsupportedShapeError

# What the interpreter pretends to have, so that small tests split work as a GPU does.
_INTERPRETED_PROCESSORS = 4


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=16)
def processor_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_attention_shapes(
    q: torch.Tensor,  # [rows, H, D]
    k_cache: torch.Tensor,  # [NB, KH, BS, D]
    v_cache: torch.Tensor,  # [NB, KH, BS, D]
) -> None:
    """Refuse what the attention kernels cannot compute.

    Raises:
        UnsupportedShapeError: A head dimension that is not a power of two from 16 to 256, query
            heads that are no multiple of the key/value heads, or a last dimension with gaps.
    """
    head_dim = q.shape[2]
    if head_dim not in (16, 32, 64, 128, 256):
        raise UnsupportedShapeError(
            f"head dimension {head_dim}: attention needs 16, 32, 64, 128 or 256"
        )
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    if heads % kv_heads:
        raise UnsupportedShapeError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    if q.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise UnsupportedShapeError("attention needs a last dimension of stride 1")
