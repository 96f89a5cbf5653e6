# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""How one program of each rank exchanges values with the same program of the others.

`all_reduce.py`, `reduce_norm.py` and `all_gather.py` use it.

Each program writes its values into the other ranks' receive buffers, then a flag, and waits for the
others' flags: a round. All ranks launch the same kernels with the same grids in the same order, so
that a program is in the same round on all ranks, or one ahead. Its number of rounds is in device
memory, where the kernel itself counts: a CUDA graph may be replayed any number of times. Programs
have nothing in common, so that launches of any grids may follow each other. The launches of a rank
must not overlap.

A flag is the number of the round, and a round has the receive buffers of its parity. These two are
enough, since nobody can be two rounds ahead. A rank that writes in round n has seen all flags of
n - 1. Each was set after the rank had read what it received in n - 2, since between a program's
reads and its next flag is a barrier, and a flag is set with release semantics. So what is replaced
has been read, however slow a rank is. What was written in round n is read after the flag of n, or
of n + 1, was seen with acquire semantics, and that of n + 1 changes only the other parity's
buffers.

A program that misses another rank for longer than the timeout says so, and never sends or waits
again: whoever missed it for a while still finds what it sent in its last round, and nothing else.
Its results are garbage from then on. The timeout becomes 0, so that no other program waits for it
again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagewire.kernels import rank_memory as layout

_ROUND_BYTES = tl.constexpr(layout.ROUND_BYTES)
_ALIGNED = tl.constexpr(layout.ALIGNED)
# The interpreter has no clock: a look at the flags takes about this many ns.
_LOOK_NS = tl.constexpr(1_000_000)
_GAVE_UP = tl.constexpr(1 << 16)  # added to the number of a missing rank


@triton.jit
def receive_buffer(
    address, dtype: tl.constexpr, number, source, COUNT: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Return the pointer to where a rank's program receives what `source` sends in a round.

    Args:
        address: of the rank's memory.
        dtype: of the values.
        number: of the round.
        source: a rank.
        COUNT: number of ranks.
        PROGRAMS: number of programs that have buffers.
    """
    ITEM: tl.constexpr = dtype.primitive_bitwidth // 8  # bytes of a value
    FLAGS: tl.constexpr = tl.cdiv(PROGRAMS * COUNT * 8, _ALIGNED) * _ALIGNED // ITEM
    PART: tl.constexpr = _ROUND_BYTES // COUNT // _ALIGNED * _ALIGNED // ITEM
    part = (tl.program_id(0) * 2 + (number & 1)) * COUNT + source
    return tl.multiple_of(address.to(tl.pointer_type(dtype)) + (FLAGS + part * PART), 16)


@triton.jit
def flags_of(rank, addresses_ptr, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """Return the addresses of this program's flags, `[THREADS]`: on other ranks, and on this one.

    Thread t has the flag of rank t % COUNT.
    """
    program = tl.program_id(0)
    source = tl.arange(0, THREADS) % COUNT
    theirs = tl.load(addresses_ptr + source) + (program * COUNT + rank) * 8
    own = tl.load(addresses_ptr + rank + source * 0) + (program * COUNT + source) * 8
    return theirs, own


@triton.jit
def exchange(
    values,  # [BLOCK]
    lanes,
    mask,
    number,  # of the program's last round; below 0: it has missed a rank
    rank,
    theirs,
    own,
    addresses_ptr,
    state_ptr,
    missing_ptr,
    COUNT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    THREADS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Send values to all other ranks, and wait until theirs are in this rank's receive buffers.

    Returns the number of the round, or -1 if another rank is missing.
    """
    if number >= 0:
        number += 1
        for step in tl.static_range(1, COUNT):  # each rank begins with another one
            address = tl.load(addresses_ptr + (rank + step) % COUNT)
            buffer = receive_buffer(address, values.dtype, number, rank, COUNT, PROGRAMS)
            tl.store(buffer + lanes, values, mask=mask)
        number = meet(number, theirs, own, state_ptr, missing_ptr, COUNT, THREADS, ON_GPU)
    return number


@triton.jit
def add_up(x, lanes, mask, number, rank, own, COUNT: tl.constexpr, PROGRAMS: tl.constexpr):
    """Return the sum of this rank's values and of those received in a round, in their dtype."""
    total = x.to(tl.float32)
    for source in tl.static_range(COUNT):
        part_ptr = receive_buffer(own, x.dtype, number, source, COUNT, PROGRAMS)
        received = tl.load(part_ptr + lanes, mask=mask & (source != rank), other=0.0)
        part = tl.where(source == rank, x, received).to(tl.float32)
        total = part if source == 0 else total + part
    return total.to(x.dtype)


@triton.jit
def meet(
    number,
    theirs,
    own,
    state_ptr,
    missing_ptr,
    COUNT: tl.constexpr,
    THREADS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """End a round in which values have been sent: set flags, and wait for those of all ranks.

    Returns the number of the round, or -1 if a rank has not come within the timeout.

    Threads do not read the same at the same time, so that branches only depend on a maximum over
    all of them.
    """
    threads = tl.arange(0, THREADS)
    source = threads % COUNT
    numbers = number + tl.zeros([THREADS], tl.int64)
    _set_flags(theirs, numbers, threads < COUNT, ON_GPU)
    begin = _now(threads, ON_GPU)
    waited = begin * 0
    timeout = begin * 0
    outcome = tl.full([], 1, tl.int32)
    while (outcome > 0) & (outcome < _GAVE_UP):
        timeout = tl.load(state_ptr + threads * 0, volatile=True)  # it may become shorter
        is_late = _flags(own, ON_GPU) < numbers
        waited = _now(threads, ON_GPU) - begin if ON_GPU else waited + _LOOK_NS
        late = 1 + source + tl.where(waited >= timeout, _GAVE_UP, 0)
        outcome = tl.max(tl.where(is_late, late, 0), axis=0)
    tl.debug_barrier()  # what one thread has acquired is so for all
    if outcome > 0:
        # Not if another program has missed a rank before: that has kept others waiting.
        missing = outcome - _GAVE_UP + numbers * 0
        tl.store(missing_ptr + threads * 0, missing, mask=(threads == 0) & (timeout > 0))
        tl.store(state_ptr + threads * 0, numbers * 0, mask=threads == 0)
        number = tl.full([], -1, tl.int64)
    return number


@triton.jit
def _set_flags(addresses, numbers, mask, ON_GPU: tl.constexpr):
    tl.debug_barrier()  # after all that the program's threads have read and written
    if ON_GPU:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred %p;
                setp.ne.b32 %p, $3, 0;
                @%p st.release.sys.global.b64 [$1], $2;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,l,r,~{memory}",
            [addresses, numbers, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        flags = addresses.to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flags, numbers, mask=mask, sem="release", scope="sys")


@triton.jit
def _flags(addresses, ON_GPU: tl.constexpr):
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];",
            "=l,l,~{memory}",
            [addresses],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        flags = addresses.to(tl.pointer_type(tl.int64))
        return tl.atomic_add(flags, tl.zeros_like(addresses), sem="acquire", scope="sys")


@triton.jit
def _now(threads, ON_GPU: tl.constexpr):
    """Return the GPU's clock in ns, as each thread reads it; 0 in the interpreter."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer; // $1",
            "=l,r",
            [threads],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        return threads.to(tl.int64) * 0
