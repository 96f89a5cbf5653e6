# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The sum of the ranks' values, by rounds of `_rank_exchange.py`, one for each part of them.

Each rank sends its values to all others, and adds up all in the order of the ranks, in float32, so
that the sums have the same bits on each rank. With more than two ranks, that sends more than
needed. So of many values each rank adds up a part, and sends the sums to the others in another
round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, overlap_options
from pagewire.kernels._rank_exchange import add_up, exchange, flags_of, meet, receive_buffer
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.rank_memory import RankMemory, part_bytes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ONE_SHOT_BYTES = 1 << 20  # to be measured
LEAST_BLOCK = 1024  # values
_UNIT = 16
_VALUES_A_THREAD = 8  # unless there are too many
_MOST_WARPS = 16


@triton.jit(do_not_specialize=["rank", "units"])
def _all_reduce_kernel(
    x_ptr,  # [size], replaced by the sums
    addresses_ptr,
    state_ptr,
    missing_ptr,
    rank,
    units,  # size / UNIT
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    UNIT: tl.constexpr,  # values
    OVERLAPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    size = units * UNIT
    own = tl.load(addresses_ptr + rank)
    theirs, flags = flags_of(rank, addresses_ptr, COUNT, THREADS)
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
            theirs,
            flags,
            addresses_ptr,
            state_ptr,
            missing_ptr,
            COUNT,
            PROGRAMS,
            THREADS,
            ON_GPU,
        )
        total = add_up(x, lanes, mask, number, rank, own, COUNT, PROGRAMS)
        tl.store(x_ptr + start + lanes, total, mask=mask)
    tl.store(state_ptr + 1 + program, number)


@triton.jit(do_not_specialize=["rank", "units"])
def _two_shot_kernel(
    x_ptr,  # [size], replaced by the sums
    addresses_ptr,
    state_ptr,
    missing_ptr,
    rank,
    units,  # size / UNIT
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,  # values that a rank adds up at once
    THREADS: tl.constexpr,
    UNIT: tl.constexpr,  # values
    OVERLAPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    size = units * UNIT
    own = tl.load(addresses_ptr + rank)
    theirs, flags = flags_of(rank, addresses_ptr, COUNT, THREADS)
    await_predecessor(OVERLAPS)
    number = tl.load(state_ptr + 1 + program)
    for start in tl.range(program * BLOCK * COUNT, size, tl.num_programs(0) * BLOCK * COUNT):
        if number >= 0:
            number += 1
            for step in tl.static_range(1, COUNT):
                other = (rank + step) % COUNT
                places = start + other * BLOCK + lanes
                x = tl.load(x_ptr + places, mask=places < size, other=0.0)
                address = tl.load(addresses_ptr + other)
                buffer = receive_buffer(address, x.dtype, number, rank, COUNT, PROGRAMS)
                tl.store(buffer + lanes, x, mask=places < size)
            number = meet(number, theirs, flags, state_ptr, missing_ptr, COUNT, THREADS, ON_GPU)
        places = start + rank * BLOCK + lanes
        mask = places < size
        x = tl.load(x_ptr + places, mask=mask, other=0.0)
        total = add_up(x, lanes, mask, number, rank, own, COUNT, PROGRAMS)
        number = exchange(
            total,
            lanes,
            mask,
            number,
            rank,
            theirs,
            flags,
            addresses_ptr,
            state_ptr,
            missing_ptr,
            COUNT,
            PROGRAMS,
            THREADS,
            ON_GPU,
        )
        for source in tl.static_range(COUNT):
            places = start + source * BLOCK + lanes
            part_ptr = receive_buffer(own, x.dtype, number, source, COUNT, PROGRAMS)
            mask = (places < size) & (source != rank)
            part = tl.where(source == rank, total, tl.load(part_ptr + lanes, mask=mask, other=0.0))
            tl.store(x_ptr + places, part, mask=places < size)
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


def all_reduce(
    x: torch.Tensor, memory: RankMemory, one_shot_bytes: int = ONE_SHOT_BYTES
) -> torch.Tensor:
    """Add up the values of all ranks, which call this with the same shape and dtype.

    Args:
        x: `[rows, ...]` contiguous, in float32, float16 or bfloat16; gets the sums, rounded once.
        memory: the ranks' buffers. Launches that use them must not overlap.
        one_shot_bytes: of larger values, more than two ranks add up a part each; the same on all.

    Returns:
        `x`. It is garbage if `memory.missing` is not 0.

    Raises:
        UnsupportedShapeError: `x` has gaps or another dtype.
    """
    if not x.is_contiguous() or x.dtype not in DTYPES:
        raise UnsupportedShapeError(f"ranks cannot add up {x.dtype} with strides {x.stride()}")
    if (size := x.numel()) == 0:
        return x
    count = memory.num_ranks
    is_one_shot = count <= 2 or x.nbytes <= one_shot_bytes
    kernel, parts = (_all_reduce_kernel, 1) if is_one_shot else (_two_shot_kernel, count)
    block = block_of(triton.cdiv(size, parts), x.element_size(), memory)
    warps = warps_of(block)
    unit = _UNIT if x.shape[-1] % _UNIT == 0 else 1  # the same for any number of rows
    kernel[(min(memory.num_programs, triton.cdiv(size, block * parts)),)](
        x,
        memory.addresses,
        memory.state,
        memory.missing,
        memory.rank,
        size // unit,
        COUNT=count,
        PROGRAMS=memory.num_programs,
        BLOCK=block,
        THREADS=32 * warps,
        UNIT=unit,
        ON_GPU=x.device.type == "cuda",
        num_warps=warps,
        **overlap_options(x.device, len(x)),
    )
    return x
