# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Records the tokens that a device slot has seen, and how often each is in its output.

Both are computed from token ids when a sequence is loaded into a device slot, in two launches: one
clears the previous values, the other enters the tokens. After that, each sampled token is counted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels import shaping_tables as layout
from pagewire.kernels._launch import next_power_of_2
from pagewire.kernels.shaping_tables import ShapingTables

_CHUNK = 4096
_ENTERED = 1024  # tokens per program
_ROW_WORDS = tl.constexpr(layout.ROW_WORDS)
_FLAGS = tl.constexpr(layout.FLAGS)
_IS_NOTED = tl.constexpr(layout.IS_NOTED)
_HISTORY_AT = tl.constexpr(layout.HISTORY_AT)
_HISTORY = tl.constexpr(layout.HISTORY)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _clear_kernel(slots_ptr, seen_ptr, counts_ptr, vocab_size, words, CHUNK: tl.constexpr):
    slot = tl.load(slots_ptr + tl.program_id(1))
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    zeros = tl.zeros([CHUNK], dtype=tl.int32)
    tl.store(counts_ptr + slot * vocab_size + ids, zeros, mask=ids < vocab_size)
    # These are more words than this chunk has: other programs clear them, too.
    tl.store(seen_ptr + slot * words + ids, zeros, mask=ids < words)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "ends_ptr", "output_starts_ptr"])
def _enter_kernel(
    slots_ptr,
    ends_ptr,  # [N] int64
    output_starts_ptr,
    tokens_ptr,
    seen_ptr,
    counts_ptr,
    vocab_size,
    words,
    SIZE: tl.constexpr,
):
    index = tl.program_id(1)
    slot = tl.load(slots_ptr + index)
    start = tl.load(ends_ptr + index - 1, mask=index > 0, other=0)
    length = tl.load(ends_ptr + index) - start
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = place < length
    tokens = tl.load(tokens_ptr + start + place, mask=inside, other=0)
    is_output = place >= tl.load(output_starts_ptr + index)
    inside &= (tokens >= 0) & (tokens < vocab_size)
    ones = tl.full([SIZE], 1, dtype=tl.int32)
    counts_ptr += slot * vocab_size
    tl.atomic_add(counts_ptr + tokens, ones, mask=inside & is_output, sem="relaxed")
    bits = ones << (tokens % 32).to(tl.int32)
    tl.atomic_or(seen_ptr + slot * words + tokens // 32, bits, mask=inside, sem="relaxed")


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["tokens_ptr", "slots_ptr", "positions_ptr"],
)
def _record_kernel(
    tokens_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    seen_ptr,
    counts_ptr,
    count,
    vocab_size,
    words,
    SIZE: tl.constexpr,
):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    slots = tl.load(slots_ptr + index, mask=inside, other=0)
    row_ptr = rows_ptr + slots * _ROW_WORDS
    flags = tl.load(row_ptr + _FLAGS, mask=inside, other=0)
    is_noted = inside & ((flags & _IS_NOTED) != 0)
    tokens = tl.load(tokens_ptr + index, mask=is_noted, other=0)
    places = tl.load(positions_ptr + index, mask=is_noted, other=0) & (_HISTORY - 1)
    tl.store(row_ptr + _HISTORY_AT + places, tokens.to(tl.int32), mask=is_noted)
    is_noted &= (tokens >= 0) & (tokens < vocab_size)
    cells = seen_ptr + slots * words + tokens // 32
    bits = tl.full([SIZE], 1, dtype=tl.int32) << (tokens % 32).to(tl.int32)
    tl.store(cells, tl.load(cells, mask=is_noted, other=0) | bits, mask=is_noted)
    cells = counts_ptr + slots * vocab_size + tokens
    tl.store(cells, tl.load(cells, mask=is_noted, other=0) + 1, mask=is_noted)


def enter_tokens(
    tables: ShapingTables,
    slots: torch.Tensor,
    ends: torch.Tensor,
    output_starts: torch.Tensor,
    tokens: torch.Tensor,
    longest: int,
) -> None:
    """Replace the seen tokens and counts of device slots.

    Shapes and meaning are those of `pagewire.kernels.EnterTokens`.
    """
    vocab_size, words, count = tables.vocab_size, tables.seen.shape[1], slots.shape[0]
    if count == 0:
        return
    chunk = min(_CHUNK, next_power_of_2(vocab_size))
    _clear_kernel[(-(-vocab_size // chunk), count)](
        slots, tables.seen, tables.counts, vocab_size, words, CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    if longest > 0:
        _enter_kernel[(-(-longest // _ENTERED), count)](
            slots, ends, output_starts, tokens, tables.seen, tables.counts, vocab_size, words,
            SIZE=_ENTERED, num_warps=4,
        )  # fmt: skip


def record_tokens(
    tables: ShapingTables, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> None:
    """Add an output token to the counts and history of each device slot.

    Shapes and meaning are those of `pagewire.kernels.RecordTokens`.
    """
    count = tokens.shape[0]
    if count:
        size = 128
        _record_kernel[(-(-count // size),)](
            tokens, slots, positions, tables.rows, tables.seen, tables.counts, count,
            tables.vocab_size, tables.seen.shape[1], SIZE=size, num_warps=4,
        )  # fmt: skip
