# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The sum of the ranks' values, in one round of `_rank_exchange.py` for each part of them.

Each rank sends its values to all others, and adds up all in the order of the ranks, in float32, so
that the sums have the same bits on each rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, overlap_options
from pagewire.kernels._rank_exchange import exchange, receive_buffer
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.rank_memory import RankMemory, part_bytes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAST_BLOCK = 1024  # values
_VALUES_A_THREAD = 8  # unless there are too many
_MOST_WARPS = 16


@triton.jit(do_not_specialize=["rank"])
def _all_reduce_kernel(
    x_ptr,  # [size], replaced by the sums
    addresses_ptr,
    state_ptr,
    missing_ptr,
    rank,
    size,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    own = tl.load(addresses_ptr + rank)
    await_predecessor(OVERLAPS)
    number = tl.load(state_ptr + 1 + program)
    for start in tl.range(program * BLOCK, size, tl.num_programs(0) * BLOCK):
        mask = start + lanes < size
        x = tl.load(x_ptr + start + lanes, mask=mask, other=0.0)
        number = exchange(
            x,
            lanes,
            mask,
            number,
            rank,
            addresses_ptr,
            state_ptr,
            missing_ptr,
            COUNT,
            PROGRAMS,
            THREADS,
            ON_GPU,
        )
        total = x.to(tl.float32)
        for source in tl.static_range(COUNT):
            part_ptr = receive_buffer(own, x.dtype, number, source, COUNT, PROGRAMS)
            received = tl.load(part_ptr + lanes, mask=mask & (source != rank), other=0.0)
            part = tl.where(source == rank, x, received).to(tl.float32)
            total = part if source == 0 else total + part
        tl.store(x_ptr + start + lanes, total.to(x.dtype), mask=mask)
    tl.store(state_ptr + 1 + program, number)


def block_of(size: int, itemsize: int, memory: RankMemory) -> int:
    """Return how many values a program sends at once, so that one round is enough, if it can be."""
    most = part_bytes(memory.num_ranks) // itemsize
    block = LEAST_BLOCK
    while 2 * block <= most and size > memory.num_programs * block:
        block = 4 * block if 4 * block <= most else 2 * block
    return block


def warps_of(block: int) -> int:
    """Return the number of warps of a program that sends this many values at once."""
    return min(block // (32 * _VALUES_A_THREAD), _MOST_WARPS)


def all_reduce(x: torch.Tensor, memory: RankMemory) -> torch.Tensor:
    """Add up the values of all ranks, which call this with the same shape and dtype.

    Args:
        x: `[rows, ...]` contiguous, in float32, float16 or bfloat16; gets the sums, rounded once.
        memory: the ranks' buffers. Launches that use them must not overlap.

    Returns:
        `x`. It is garbage if `memory.missing` is not 0.

    Raises:
        UnsupportedShapeError: `x` has gaps or another dtype.
    """
    if not x.is_contiguous() or x.dtype not in DTYPES:
        raise UnsupportedShapeError(f"ranks cannot add up {x.dtype} with strides {x.stride()}")
    if (size := x.numel()) == 0:
        return x
    block = block_of(size, x.element_size(), memory)
    warps = warps_of(block)
    _all_reduce_kernel[(min(memory.num_programs, triton.cdiv(size, block)),)](
        x,
        memory.addresses,
        memory.state,
        memory.missing,
        memory.rank,
        size,
        COUNT=memory.num_ranks,
        PROGRAMS=memory.num_programs,
        BLOCK=block,
        THREADS=32 * warps,
        ON_GPU=x.device.type == "cuda",
        num_warps=warps,
        **overlap_options(x.device, len(x)),
    )
    return x
