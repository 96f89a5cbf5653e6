# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sampling: argmax, min-p, exact top-k and top-p thresholds by search, Gumbel-max by Philox.

Four small launches, all but the threshold search cut into chunks of the vocabulary:
the largest logit per chunk; per row the greedy token and the smallest candidate logit; per chunk
the largest perturbed candidate; per row the token. Greedy rows leave after the second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import next_power_of_2

_CHUNK = 4096
# One step of the noise: skipped where it holds no candidate.
_DRAW_STEP = 1024
# Low bits of a float32 that are 0 in a value of the dtype: the search need not visit them.
_SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _load_scores(row_ptr, ids, vocab_size):
    """Logits as float32: NaN and what lies past the vocabulary -inf, +inf the largest float."""
    scores = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.minimum(scores, 3.4028234663852886e38)


@triton.jit
def _chunk_max_kernel(
    logits_ptr,
    best_ptr,  # [B, chunks] float32
    best_id_ptr,  # [B, chunks] int32
    logits_stride,
    vocab_size,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = _load_scores(logits_ptr + row * logits_stride, ids, vocab_size)
    best = tl.max(scores, axis=0)
    cell = row * tl.num_programs(0) + chunk
    tl.store(best_ptr + cell, best)
    tl.store(best_id_ptr + cell, tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0))


@triton.jit
def _key_of(value, SHIFT: tl.constexpr):
    """Map a float32 scalar to an int64 of the same order, less the bits that the dtype lacks."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) >> SHIFT


@triton.jit
def _value_of(key, SHIFT: tl.constexpr):
    """Undo `_key_of`."""
    bits = (key << SHIFT).to(tl.int32)
    negative = (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF
    return tl.where(bits < 0, negative, bits).to(tl.float32, bitcast=True)


@triton.jit
def _measure(
    row_ptr,
    vocab_size,
    low,
    middle,
    high,
    highest,
    temperature,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the counts, and the masses, of logits that are at least each of three values."""
    lanes = tl.arange(0, BLOCK)
    low_count = tl.zeros([BLOCK], dtype=tl.int32)
    middle_count = tl.zeros([BLOCK], dtype=tl.int32)
    high_count = tl.zeros([BLOCK], dtype=tl.int32)
    low_mass = tl.zeros([BLOCK], dtype=tl.float32)
    middle_mass = tl.zeros([BLOCK], dtype=tl.float32)
    high_mass = tl.zeros([BLOCK], dtype=tl.float32)
    for first in tl.range(0, vocab_size, BLOCK, num_stages=3):
        ids = first + lanes
        scores = _load_scores(row_ptr, ids, vocab_size)
        inside = ids < vocab_size
        above_low = (scores >= low) & inside
        above_middle = (scores >= middle) & inside
        above_high = (scores >= high) & inside
        low_count += above_low.to(tl.int32)
        middle_count += above_middle.to(tl.int32)
        high_count += above_high.to(tl.int32)
        if BY_MASS:
            mass = tl.exp((scores - highest) / temperature)
            low_mass += tl.where(above_low, mass, 0.0)
            middle_mass += tl.where(above_middle, mass, 0.0)
            high_mass += tl.where(above_high, mass, 0.0)
    low_total = tl.sum(low_count, axis=0)
    middle_total = tl.sum(middle_count, axis=0)
    high_total = tl.sum(high_count, axis=0)
    if BY_MASS:
        low_measure = tl.sum(low_mass, axis=0)
        middle_measure = tl.sum(middle_mass, axis=0)
        high_measure = tl.sum(high_mass, axis=0)
    else:
        low_measure = low_total.to(tl.float32)
        middle_measure = middle_total.to(tl.float32)
        high_measure = high_total.to(tl.float32)
    return low_total, middle_total, high_total, low_measure, middle_measure, high_measure


@triton.jit
def _search_threshold(
    row_ptr,
    vocab_size,
    lowest,
    highest,
    temperature,
    wanted,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the largest value whose measure reaches what is wanted.

    The measure of a value: how many logits are at least it (top-k, `wanted` of them), or their
    probability mass (top-p, `wanted` of the mass from `lowest` up). Three probes a pass over the
    row quarter the bracket [low, high) of the dtype's values in order, until one logit or one value
    is left in it.
    """
    spread = 1.0
    if BY_MASS:
        spread = temperature
    low = _key_of(lowest, SHIFT)
    high = _key_of(highest, SHIFT) + 1
    # First probes at usual places, since most floats are far from any logit.
    middle_key = tl.maximum(_key_of(highest - 8.0 * spread, SHIFT), low)
    high_key = tl.maximum(_key_of(highest - 2.0 * spread, SHIFT), low)
    low_count, middle_count, high_count, low_measure, middle_measure, high_measure = _measure(
        row_ptr, vocab_size, lowest, _value_of(middle_key, SHIFT), _value_of(high_key, SHIFT),
        highest, temperature, BY_MASS, BLOCK,
    )  # fmt: skip
    target = wanted
    if BY_MASS:
        target = wanted * low_measure
    count_low = low_count
    count_high = 0
    if middle_measure >= target:
        low = middle_key
        count_low = middle_count
    else:
        high = middle_key
        count_high = middle_count
    if high_measure >= target:
        low = tl.maximum(low, high_key)
        count_low = tl.minimum(count_low, high_count)
    else:
        high = tl.minimum(high, high_key)
        count_high = tl.maximum(count_high, high_count)
    while (high - low > 1) & (count_low - count_high > 1):
        width = high - low
        low_key = low + width // 4
        middle_key = low + width // 2
        high_key = low + width // 2 + width // 4
        low_count, middle_count, high_count, low_measure, middle_measure, high_measure = _measure(
            row_ptr, vocab_size, _value_of(low_key, SHIFT), _value_of(middle_key, SHIFT),
            _value_of(high_key, SHIFT), highest, temperature, BY_MASS, BLOCK,
        )  # fmt: skip
        if high_measure >= target:
            low = high_key
            count_low = high_count
        else:
            high = high_key
            count_high = high_count
            if middle_measure >= target:
                low = middle_key
                count_low = middle_count
            else:
                high = middle_key
                count_high = middle_count
                if low_measure >= target:
                    low = low_key
                    count_low = low_count
                else:
                    high = low_key
                    count_high = low_count
    return _value_of(low, SHIFT)


@triton.jit
def _threshold_kernel(
    logits_ptr,
    best_ptr,  # [B, chunks] float32
    best_id_ptr,  # [B, chunks] int32
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    limits_ptr,  # [B, 2] float32: the largest logit, the smallest candidate
    out_ptr,
    logits_stride,
    parameter_stride,
    vocab_size,
    chunks,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNKS_PAD)
    inside = columns < chunks
    best = tl.load(best_ptr + row * chunks + columns, mask=inside, other=float("-inf"))
    best_id = tl.load(best_id_ptr + row * chunks + columns, mask=inside, other=0x7FFFFFFF)
    highest = tl.max(best, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(best == highest, best_id, 0x7FFFFFFF), axis=0))
    temperature = tl.load(temperature_ptr + row * parameter_stride)
    if temperature > 0.0:
        temperature = tl.maximum(temperature, 1.0e-30)
        highest = tl.maximum(highest, -3.4028234663852886e38)
        top_k = tl.load(top_k_ptr + row * parameter_stride)
        top_p = tl.load(top_p_ptr + row * parameter_stride)
        min_p = tl.load(min_p_ptr + row * parameter_stride)
        row_ptr = logits_ptr + row * logits_stride
        lowest = highest - float("inf")
        if (top_k > 0) & (top_k < vocab_size):
            lowest = _search_threshold(
                row_ptr, vocab_size, lowest, highest, temperature, top_k.to(tl.float32),
                False, BLOCK, SHIFT,
            )  # fmt: skip
        if min_p > 0.0:
            lowest = tl.maximum(lowest, highest + tl.log(min_p) * temperature)
        if top_p < 1.0:
            found = _search_threshold(
                row_ptr, vocab_size, lowest, highest, temperature, top_p, True, BLOCK, SHIFT
            )
            lowest = tl.maximum(lowest, found)  # which lies below it if its dtype is coarser
        tl.store(limits_ptr + row * 2, highest)
        tl.store(limits_ptr + row * 2 + 1, lowest)


@triton.jit
def _gumbel(seed, position, ids):
    """Gumbel noise of token ids: see `gumbel_noise` of the torch reference."""
    word, _, _, _ = tl.philox(seed, ids, position.to(tl.int32), 0, 0)
    v = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    v = tl.minimum(v, 0.99999994)
    # -log(1 - v): by its series where 1 - v would round most of v away.
    series = v * (1.0 + v * (0.5 + v * (0.33333333333 + v * (0.25 + v * 0.2))))
    exponential = tl.where(v < 0.0625, series, -tl.log(1.0 - v))
    return -tl.log(exponential)


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    limits_ptr,  # [B, 2] float32
    best_ptr,  # [B, chunks] float32
    best_id_ptr,  # [B, chunks] int32
    logits_stride,
    parameter_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * parameter_stride)
    if temperature > 0.0:
        temperature = tl.maximum(temperature, 1.0e-30)
        highest = tl.load(limits_ptr + row * 2)
        lowest = tl.load(limits_ptr + row * 2 + 1)
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        row_ptr = logits_ptr + row * logits_stride
        best = tl.full([STEP], float("-inf"), dtype=tl.float32)
        best_id = chunk * CHUNK + tl.arange(0, STEP)
        for first in range(0, CHUNK, STEP):
            ids = chunk * CHUNK + first + tl.arange(0, STEP)
            scores = _load_scores(row_ptr, ids, vocab_size)
            if tl.max(scores, axis=0) >= lowest:
                noisy = (scores - highest) / temperature + _gumbel(seed, position, ids)
                noisy = tl.where(scores >= lowest, noisy, float("-inf"))
                better = noisy > best
                best = tl.where(better, noisy, best)
                best_id = tl.where(better, ids, best_id)
        top = tl.max(best, axis=0)
        cell = row * tl.num_programs(0) + chunk
        tl.store(best_ptr + cell, top)
        tl.store(best_id_ptr + cell, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), axis=0))


@triton.jit
def _pick_kernel(
    best_ptr,  # [B, chunks] float32
    best_id_ptr,  # [B, chunks] int32
    temperature_ptr,
    out_ptr,
    parameter_stride,
    chunks,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature_ptr + row * parameter_stride) > 0.0:
        columns = tl.arange(0, CHUNKS_PAD)
        inside = columns < chunks
        best = tl.load(best_ptr + row * chunks + columns, mask=inside, other=float("-inf"))
        best_id = tl.load(best_id_ptr + row * chunks + columns, mask=inside, other=0x7FFFFFFF)
        top = tl.max(best, axis=0)
        tl.store(out_ptr + row, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), axis=0))


def _equally_strided(*parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the parameters with one stride: a few columns of one tensor have it already."""
    if len({parameter.stride(0) for parameter in parameters}) == 1:
        return parameters
    return tuple(parameter.contiguous() for parameter in parameters)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row: greedy at temperature 0, else the Gumbel-max trick.

    Shapes and meaning are those of `pagewire.kernels.Sample`.
    """
    rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    if rows == 0:
        return out
    chunk = min(_CHUNK, max(next_power_of_2(vocab_size), _DRAW_STEP))
    chunks = -(-vocab_size // chunk)
    best = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    best_id = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    limits = torch.empty((rows, 2), dtype=torch.float32, device=device)
    stride, pad = logits.stride(0), next_power_of_2(chunks)
    temperature, top_k, top_p, min_p = _equally_strided(temperature, top_k, top_p, min_p)
    step = temperature.stride(0)
    _chunk_max_kernel[(chunks, rows)](
        logits, best, best_id, stride, vocab_size, CHUNK=chunk, num_warps=8
    )
    _threshold_kernel[(rows,)](
        logits, best, best_id, temperature, top_k, top_p, min_p, limits, out, stride, step,
        vocab_size, chunks,
        CHUNKS_PAD=pad, BLOCK=chunk, SHIFT=_SPARE_BITS[logits.dtype], num_warps=16,
    )  # fmt: skip
    _draw_kernel[(chunks, rows)](
        logits, temperature, seeds, positions, limits, best, best_id, stride, step,
        vocab_size, CHUNK=chunk, STEP=_DRAW_STEP, num_warps=4,
    )  # fmt: skip
    _pick_kernel[(rows,)](
        best, best_id, temperature, out, step, chunks, CHUNKS_PAD=pad, num_warps=1
    )
    return out
