# mypy: allow-untyped-decorators
"""Shared parts of the launchers: shape checks and properties of the device.

Launchers never wait for the device and never branch on a tensor's values, so that a captured CUDA
graph replays with any metadata. They launch on the current device, which must have the tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.kernels.errors import UnsupportedShapeError

# Assumed SMs of the interpreter, so that small tests split work as on a GPU.
_INTERPRETED_SMS = 4
# In larger batches (measured on an H200), early programs cost more than they save: they crowd on
# the SMs that have room.
_MOST_OVERLAPPING_ROWS = 16
LEAST_ROWS = 16  # of a matrix product of the tensor cores
MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=16)
def _is_hopper_or_newer(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def can_copy_tiles(device: torch.device) -> bool:
    """Return whether a device loads tiles by descriptor (TMA); Triton's interpreter does."""
    return device.type == "cpu" or _is_hopper_or_newer(device)


def overlap_options(
    device: torch.device, rows: int, most_rows: int = _MOST_OVERLAPPING_ROWS
) -> dict[str, Any]:
    """Return the options of a launch that may start while the kernel before it still runs.

    This is CUDA's programmatic dependent launch; it saves some microseconds between the launches of
    a small step. Every program of such a kernel calls `await_predecessor(OVERLAPS)` before it reads
    what another kernel writes, or writes what another one reads. It may read a model's weights
    before, since no kernel writes them.

    Args:
        device: the device of the launch.
        rows: number of tokens of the step.
        most_rows: with more tokens, launches do not overlap.
    """
    if rows <= most_rows and _is_hopper_or_newer(device):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def await_predecessor(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel's programs start, and wait for the writes of all kernels before."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


def check_attention_shapes(
    q: torch.Tensor,  # [rows, H, D]
    k_cache: torch.Tensor,  # [NB, KH, BS, D]
    v_cache: torch.Tensor,  # [NB, KH, BS, D]
) -> None:
    """Refuse shapes that the attention kernels cannot compute.

    Raises:
        UnsupportedShapeError: A head dimension that is not a multiple of 8 from 16 to 256, query
            heads that are not a multiple of the key/value heads, or a last dimension with gaps.
    """
    head_dim = q.shape[2]
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise UnsupportedShapeError(
            f"head dimension {head_dim}: attention needs a multiple of 8 from {MIN_HEAD_DIM} to "
            f"{MAX_HEAD_DIM}"
        )
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    if heads % kv_heads:
        raise UnsupportedShapeError(f"{heads} query heads: not a multiple of {kv_heads} KV heads")
    if q.stride(2) != 1 or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise UnsupportedShapeError("attention needs a last dimension of stride 1")
