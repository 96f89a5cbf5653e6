# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The sum of the ranks' values, and its RMS normalisation after adding a residual, in one kernel.

A program takes a row at a time: a round of `_rank_exchange.py`, and what `rms_norm.py` computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import await_predecessor, next_power_of_2, overlap_options
from pagewire.kernels._rank_exchange import add_up, exchange, flags_of
from pagewire.kernels.all_reduce import DTYPES, LEAST_BLOCK, warps_of
from pagewire.kernels.rank_memory import RankMemory, part_bytes
from pagewire.kernels.rms_norm import normed


@triton.jit(do_not_specialize=["rank", "rows", "residual_stride"])
def _reduce_norm_kernel(
    x_ptr,  # [rows, HIDDEN] contiguous, as are the outputs
    residual_ptr,  # [rows, HIDDEN]
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    addresses_ptr,
    state_ptr,
    missing_ptr,
    rank,
    rows,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < HIDDEN
    own = tl.load(addresses_ptr + rank)
    theirs, flags = flags_of(rank, addresses_ptr, COUNT, THREADS)
    weight = tl.load(weight_ptr + lanes, mask=mask, other=0.0).to(tl.float32)
    await_predecessor(OVERLAPS)
    number = tl.load(state_ptr + 1 + program)
    for row in tl.range(program, rows, tl.num_programs(0)):
        place = row * HIDDEN + lanes
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
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
        summed = add_up(x, lanes, mask, number, rank, own, COUNT, PROGRAMS)
        if HAS_RESIDUAL:
            source = residual_ptr + row * residual_stride + lanes
            residual = tl.load(source, mask=mask, other=0.0)
            summed = (summed.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_out_ptr + place, summed, mask=mask)
        wide = summed.to(tl.float32)
        out = normed(wide, weight, eps, x.dtype, weight_ptr.dtype.element_ty == x.dtype, HIDDEN)
        tl.store(out_ptr + place, out, mask=mask)
    tl.store(state_ptr + 1 + program, number)


def reduces_and_norms(x: torch.Tensor, memory: RankMemory) -> bool:
    """Return whether `reduce_norm` takes x: at most a row for each program, in one round.

    With more rows, the longer rounds of `all_reduce` are faster. A row of more than 4,096 numbers
    in 16 bits does not fit into a round of eight ranks.
    """
    block_bytes = next_power_of_2(x.shape[1]) * x.element_size()
    return (
        0 < len(x) <= memory.num_programs
        and x.dtype in DTYPES
        and x.is_contiguous()
        and block_bytes <= part_bytes(memory.num_ranks)
    )


def reduce_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    memory: RankMemory,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `pagewire.kernels.RmsNorm` does with the sum of all ranks' `x`.

    The sum is that of `all_reduce`, which all ranks call with the same shapes.

    Args:
        x: `[rows, hidden]`, for which `reduces_and_norms`.
        weight: see `RmsNorm`, as the following ones.
        eps: see there.
        residual: see there; the same on all ranks.
        memory: the ranks' buffers. Launches that use them must not overlap.
    """
    rows, hidden = x.shape
    block = max(next_power_of_2(hidden), LEAST_BLOCK)
    warps = warps_of(block)
    out, residual_out = torch.empty_like(x), torch.empty_like(x)
    _reduce_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        residual_out,
        memory.addresses,
        memory.state,
        memory.missing,
        memory.rank,
        rows,
        0 if residual is None else residual.stride(0),
        eps,
        HIDDEN=hidden,
        HAS_RESIDUAL=residual is not None,
        COUNT=memory.num_ranks,
        PROGRAMS=memory.num_programs,
        BLOCK=block,
        THREADS=32 * warps,
        ON_GPU=x.device.type == "cuda",
        num_warps=warps,
        **overlap_options(x.device, rows),
    )
    return out, residual_out
