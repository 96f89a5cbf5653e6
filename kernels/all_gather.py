# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Columns of all ranks joined, in one round of `_rank_exchange.py` for each part of a row."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options
from pagewire.kernels._rank_exchange import exchange, flags_of, receive_buffer
from pagewire.kernels.all_reduce import DTYPES, LEAST_BLOCK, block_of, warps_of
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.rank_memory import RankMemory

_ALIGNED = 16  # values


class Columns(NamedTuple):
    """Which columns of a whole row each rank has.

    Attributes:
        ends: `[1 + ranks]` int32, on the device: 0, then the end of each rank's columns.
        widths: numbers of columns.
    """

    ends: torch.Tensor
    widths: tuple[int, ...]

    @classmethod
    def of(cls, widths: tuple[int, ...], device: torch.device) -> Columns:
        """Return them for ranks with these numbers of columns; waits for the device."""
        return cls(torch.tensor([0, *accumulate(widths)], dtype=torch.int32, device=device), widths)


@triton.jit(do_not_specialize=["rank", "rows", "parts"])
def _all_gather_kernel(
    x_ptr,  # [rows, width]
    out_ptr,  # [rows, out_stride]
    ends_ptr,  # [1 + COUNT] int32
    addresses_ptr,
    state_ptr,
    missing_ptr,
    rank,
    rows,
    parts,  # of the longest row
    width,
    x_stride,
    out_stride,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    ALIGNED: tl.constexpr,  # what each start and width is a multiple of
    OVERLAPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    own = tl.load(addresses_ptr + rank)
    theirs, flags = flags_of(rank, addresses_ptr, COUNT, THREADS)
    await_predecessor(OVERLAPS)
    number = tl.load(state_ptr + 1 + tl.program_id(0))
    for item in tl.range(tl.program_id(0), rows * parts, tl.num_programs(0)):
        row = (item // parts).to(tl.int64)
        columns = item % parts * BLOCK + lanes
        mask = columns < width
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
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
        for source in tl.static_range(COUNT):
            start = tl.multiple_of(tl.load(ends_ptr + source), ALIGNED)
            end = tl.multiple_of(tl.load(ends_ptr + source + 1), ALIGNED)
            inside = columns < end - start
            part_ptr = receive_buffer(own, x.dtype, number, source, COUNT, PROGRAMS)
            received = tl.load(part_ptr + lanes, mask=inside & (source != rank), other=0.0)
            part = tl.where(source == rank, x, received)
            tl.store(out_ptr + row * out_stride + start + columns, part, mask=inside)
    tl.store(state_ptr + 1 + tl.program_id(0), number)


def all_gather(x: torch.Tensor, columns: Columns, memory: RankMemory) -> torch.Tensor:
    """Join the columns of all ranks, which call this with the same number of rows and dtype.

    Args:
        x: `[rows, width]` of this rank, in float32, float16 or bfloat16, any stride of the rows.
        columns: of all ranks.
        memory: the ranks' buffers. Launches that use them must not overlap.

    Returns:
        `[rows, sum of widths]`, in the order of the ranks. It is garbage if `memory.missing` is
        not 0.

    Raises:
        UnsupportedShapeError: `x` has gaps, another width or another dtype.
    """
    rows, width = x.shape
    if width != columns.widths[memory.rank] or x.stride(1) != 1 or x.dtype not in DTYPES:
        raise UnsupportedShapeError(
            f"ranks with {columns.widths} columns cannot join {x.dtype} {tuple(x.shape)} with "
            f"strides {x.stride()}"
        )
    out = torch.empty((rows, sum(columns.widths)), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    longest = max(columns.widths)
    block = block_of(rows * longest, x.element_size(), memory)
    block = min(block, max(LEAST_BLOCK, next_power_of_2(longest)))
    parts = triton.cdiv(longest, block)
    warps = warps_of(block)
    is_aligned = all(each % _ALIGNED == 0 for each in (*columns.widths, x.stride(0)))
    _all_gather_kernel[(min(memory.num_programs, rows * parts),)](
        x,
        out,
        columns.ends,
        memory.addresses,
        memory.state,
        memory.missing,
        memory.rank,
        rows,
        parts,
        width,
        x.stride(0),
        out.shape[1],
        COUNT=memory.num_ranks,
        PROGRAMS=memory.num_programs,
        BLOCK=block,
        THREADS=32 * warps,
        ALIGNED=_ALIGNED if is_aligned else 1,
        ON_GPU=x.device.type == "cuda",
        num_warps=warps,
        **overlap_options(x.device, rows),
    )
    return out
