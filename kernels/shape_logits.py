# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Applies masks, biases, penalties and banned tokens to logits.

There are three launches. The first shapes each logit, over chunks of the vocabulary. The second has
one program per row; it computes the few logits with a bias again from the raw logit, since the bias
comes before the penalties. The last bans tokens. A row without shaping is copied.

A chunk is a tile of 32 logits per line, so that a line's bits in a mask are one word, which is
loaded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels import shaping_tables as layout
from pagewire.kernels._launch import next_power_of_2
from pagewire.kernels.shaping_tables import ShapingTables

_CHUNK = 1024
# Registers of a thread: with more, fewer programs read memory at the same time.
_REGISTERS = 32
_ROW_WORDS = tl.constexpr(layout.ROW_WORDS)
_FLAGS = tl.constexpr(layout.FLAGS)
_IS_LIMITED = tl.constexpr(layout.IS_LIMITED)
_IS_PENALIZED = tl.constexpr(layout.IS_PENALIZED)
_NUM_BIASES = tl.constexpr(layout.NUM_BIASES)
_NUM_STOPS = tl.constexpr(layout.NUM_STOPS)
_NUM_BAD_WORDS = tl.constexpr(layout.NUM_BAD_WORDS)
_STOPS_FROM = tl.constexpr(layout.STOPS_FROM)
_OUTPUT_START = tl.constexpr(layout.OUTPUT_START)
_REPETITION = tl.constexpr(layout.REPETITION)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_BIAS_IDS = tl.constexpr(layout.BIAS_IDS)
_BIAS_VALUES = tl.constexpr(layout.BIAS_VALUES)
_STOP_IDS = tl.constexpr(layout.STOP_IDS)
_BAD_ENDS = tl.constexpr(layout.BAD_ENDS)
_BAD_TOKENS = tl.constexpr(layout.BAD_TOKENS)
_HISTORY_AT = tl.constexpr(layout.HISTORY_AT)
_HISTORY = tl.constexpr(layout.HISTORY)


@triton.jit
def _load_float(row_ptr, column):
    return tl.load(row_ptr + column).to(tl.float32, bitcast=True)


@triton.jit
def _known(ids, vocab_size):
    """Return which ids are tokens: others index nothing, whoever named them."""
    return (ids >= 0) & (ids < vocab_size)


@triton.jit
def _load_bits(words_ptr, words, bits, inside):
    """Return which bits of some words are set."""
    return ((tl.load(words_ptr + words, mask=inside, other=0) >> bits) & 1) != 0


@triton.jit
def _shaped(
    logits_ptr,  # of the row
    row_ptr,  # of the device slot
    allowed_ptr,
    seen_ptr,
    counts_ptr,
    mask_ptr,  # of the row, if it has one
    has_mask,
    ids,
    biases,
    inside,
    words,  # in which the ids' bits of a mask lie
    bits,
    words_inside,
):
    """Shape the logits of some ids, except for bans."""
    scores = tl.load(logits_ptr + ids, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    scores = tl.minimum(scores, 3.4028234663852886e38)
    flags = tl.load(row_ptr + _FLAGS)
    if has_mask:
        is_allowed = _load_bits(mask_ptr, words, bits, words_inside)
        scores = tl.where(is_allowed, scores, float("-inf"))
    if (flags & _IS_LIMITED) != 0:
        is_allowed = _load_bits(allowed_ptr, words, bits, words_inside)
        scores = tl.where(is_allowed, scores, float("-inf"))
    scores += biases
    if (flags & _IS_PENALIZED) != 0:
        # A count has 4 bytes: counts of tokens that were not seen are not read.
        is_seen = _load_bits(seen_ptr, words, bits, words_inside)
        counts = tl.load(counts_ptr + ids, mask=inside & is_seen, other=0)
        repetition = _load_float(row_ptr, _REPETITION)
        repeated = tl.where(scores > 0.0, scores / repetition, scores * repetition)
        scores = tl.where(is_seen, repeated, scores)
        scores -= _load_float(row_ptr, _FREQUENCY) * counts.to(tl.float32)
        scores -= tl.where(counts > 0, _load_float(row_ptr, _PRESENCE), 0.0)
    return scores


@triton.jit
def _each_kernel(
    logits_ptr,
    slots_ptr,
    rows_ptr,
    allowed_ptr,
    seen_ptr,
    counts_ptr,
    masks_ptr,
    mask_of_row_ptr,
    out_ptr,
    logits_stride,
    out_stride,
    vocab_size,
    num_words,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    mask = tl.load(mask_of_row_ptr + row)
    words = (tl.program_id(0) * (CHUNK // 32) + tl.arange(0, CHUNK // 32))[:, None]
    bits = tl.arange(0, 32)[None, :]
    ids = words * 32 + bits
    inside = ids < vocab_size
    scores = _shaped(
        logits_ptr + row * logits_stride, rows_ptr + slot * _ROW_WORDS,
        allowed_ptr + slot * num_words, seen_ptr + slot * num_words,
        counts_ptr + slot * vocab_size, masks_ptr + mask * num_words, mask >= 0, ids, 0.0, inside,
        words, bits, words < num_words,
    )  # fmt: skip
    tl.store(out_ptr + row * out_stride + ids, scores, mask=inside)


@triton.jit
def _bias_kernel(
    logits_ptr,
    slots_ptr,
    rows_ptr,
    allowed_ptr,
    seen_ptr,
    counts_ptr,
    masks_ptr,
    mask_of_row_ptr,
    out_ptr,
    logits_stride,
    out_stride,
    vocab_size,
    num_words,
    MOST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    row_ptr = rows_ptr + slot * _ROW_WORDS
    count = tl.load(row_ptr + _NUM_BIASES)
    if count > 0:
        mask = tl.load(mask_of_row_ptr + row)
        lanes = tl.arange(0, MOST)
        inside = lanes < count
        ids = tl.load(row_ptr + _BIAS_IDS + lanes, mask=inside, other=-1)
        inside = _known(ids, vocab_size)
        biases = tl.load(row_ptr + _BIAS_VALUES + lanes, mask=inside, other=0)
        scores = _shaped(
            logits_ptr + row * logits_stride, row_ptr, allowed_ptr + slot * num_words,
            seen_ptr + slot * num_words, counts_ptr + slot * vocab_size,
            masks_ptr + mask * num_words, mask >= 0, ids, biases.to(tl.float32, bitcast=True),
            inside, ids // 32, ids % 32, inside,
        )  # fmt: skip
        tl.store(out_ptr + row * out_stride + ids, scores, mask=inside)


@triton.jit
def _ban_kernel(
    slots_ptr,
    positions_ptr,
    rows_ptr,
    out_ptr,
    out_stride,
    vocab_size,
    MOST_STOPS: tl.constexpr,
    MOST_BAD_WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = rows_ptr + tl.load(slots_ptr + row) * _ROW_WORDS
    out_ptr += row * out_stride
    position = tl.load(positions_ptr + row)
    if position < tl.load(row_ptr + _STOPS_FROM):
        stops = tl.arange(0, MOST_STOPS)
        is_stop = stops < tl.load(row_ptr + _NUM_STOPS)
        ids = tl.load(row_ptr + _STOP_IDS + stops, mask=is_stop, other=-1)
        is_banned = _known(ids, vocab_size)
        tl.store(out_ptr + ids, tl.full([MOST_STOPS], float("-inf"), tl.float32), mask=is_banned)
    count = tl.load(row_ptr + _NUM_BAD_WORDS)
    if count > 0:
        known = position - tl.load(row_ptr + _OUTPUT_START)
        lanes = tl.arange(0, MOST_BAD_WORDS)
        inside = lanes < count
        end = tl.load(row_ptr + _BAD_ENDS + lanes, mask=inside, other=1)
        start = tl.load(row_ptr + _BAD_ENDS + lanes - 1, mask=inside & (lanes > 0), other=0)
        before = end - start - 1  # tokens of a word but its last
        matches = inside & (before <= known)
        for index in range(_HISTORY - 1):
            is_part = matches & (index < before)
            wanted = tl.load(row_ptr + _BAD_TOKENS + start + index, mask=is_part, other=0)
            place = (position - before + index) & (_HISTORY - 1)
            found = tl.load(row_ptr + _HISTORY_AT + place, mask=is_part, other=0)
            matches = matches & (wanted == found)
        last = tl.load(row_ptr + _BAD_TOKENS + end - 1, mask=matches, other=-1)
        is_banned = _known(last, vocab_size)
        banned = tl.full([MOST_BAD_WORDS], float("-inf"), tl.float32)
        tl.store(out_ptr + last, banned, mask=is_banned)


def shape_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tables: ShapingTables,
    masks: torch.Tensor,
    mask_of_row: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits, shaped as the requests of the device slots ask.

    Shapes and meaning are those of `pagewire.kernels.ShapeLogits`.
    """
    count, vocab_size = logits.shape
    if out is None:
        out = torch.empty((count, vocab_size), dtype=torch.float32, device=logits.device)
    if count == 0:
        return out
    chunk = max(32, min(_CHUNK, next_power_of_2(vocab_size)))
    arguments = (
        logits, slots, *tables, masks, mask_of_row, out, logits.stride(0), out.stride(0),
        vocab_size, tables.allowed.shape[1],
    )  # fmt: skip
    _each_kernel[(-(-vocab_size // chunk), count)](
        *arguments, CHUNK=chunk, num_warps=4, maxnreg=_REGISTERS
    )
    _bias_kernel[(count,)](*arguments, MOST=layout.MOST_BIASES, num_warps=8)
    _ban_kernel[(count,)](
        slots, positions, tables.rows, out, out.stride(0), vocab_size,
        MOST_STOPS=layout.MOST_STOPS, MOST_BAD_WORDS=layout.MOST_BAD_WORDS, num_warps=4,
    )  # fmt: skip
    return out
