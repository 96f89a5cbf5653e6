# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sampling: argmax, min-p, exact top-k and top-p, Gumbel-max by Philox.

There are five small launches. Two run over chunks of the vocabulary, each for a part of the rows.
For greedy rows and those without limits, the largest logit of each chunk is found; for
rows that limit their candidates, the chunk's large logits are also kept, in a segment per chunk.
The third finds the greedy token and the smallest candidate, with one program per row; if all
candidates are among the kept logits, as is usual, it also draws the token. For other random rows,
mainly those without limits, two launches draw: per chunk the largest perturbed candidate, per row
the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import next_power_of_2
from pagewire.kernels.sampling_limits import find_floor, find_lowest, load_scores

_CHUNK = 4096
# Logits that a chunk's segment holds.
_KEPT = 128
# Fields of a segment's note.
_FLOOR, _MASS, _COUNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NOTES = tl.constexpr(3)
# One step of the noise: skipped where it holds no candidate.
_DRAW_STEP = 1024
# With this many rows, even half the programs of a draw are more than a GPU runs at the same time.
_MANY_ROWS = 64
# Low bits of a float32 that are 0 in a value of the dtype: the search need not visit them.
_SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, at, vocab_size):
    """Return whether the row with parameters at `at` is random, with top-k or top-p.

    Min-p alone needs no search.
    """
    top_k = tl.load(top_k_ptr + at)
    limits = (top_k > 0) & (top_k < vocab_size)
    limits = limits | (tl.load(top_p_ptr + at) < 1.0)
    return limits & (tl.load(temperature_ptr + at) > 0.0)


@triton.jit
def _store_best(scores, ids, best_ptr, best_id_ptr, cell):
    """Store, and return, a chunk's largest logit."""
    best = tl.max(scores, axis=0)
    tl.store(best_ptr + cell, best)
    tl.store(best_id_ptr + cell, tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0))
    return best


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"])
def _chunk_max_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,  # [B, chunks] float32
    best_id_ptr,  # [B, chunks] int32
    logits_stride,
    parameter_stride,
    vocab_size,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = row * parameter_stride
    if not _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, at, vocab_size):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        scores = load_scores(logits_ptr + row * logits_stride, ids, vocab_size)
        _store_best(scores, ids, best_ptr, best_id_ptr, row * tl.num_programs(0) + chunk)


@triton.jit(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"],
)
def _keep_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,  # [B, chunks] float32
    best_id_ptr,  # [B, chunks] int32
    kept_ptr,  # [B, chunks, KEPT] int64: a logit's float32 bits, then its id
    notes_ptr,  # [B, chunks, NOTES] float32
    logits_stride,
    parameter_stride,
    vocab_size,
    chunks,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
    CHUNKS_A_PROGRAM: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = row * parameter_stride
    if _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, at, vocab_size):
        for part in range(CHUNKS_A_PROGRAM):
            chunk = tl.program_id(0) * CHUNKS_A_PROGRAM + part
            if chunk < chunks:
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                scores = load_scores(logits_ptr + row * logits_stride, ids, vocab_size)
                cell = row * chunks + chunk
                best = _store_best(scores, ids, best_ptr, best_id_ptr, cell)
                best = tl.maximum(best, -3.4028234663852886e38)
                temperature = tl.maximum(tl.load(temperature_ptr + at), 1.0e-30)
                note_ptr = notes_ptr + cell * _NOTES
                tl.store(note_ptr + _MASS, tl.sum(tl.exp((scores - best) / temperature), axis=0))
                floor = find_floor(scores, best, KEPT)
                is_kept = (scores >= floor) & (scores > float("-inf"))
                places = tl.cumsum(is_kept.to(tl.int32), axis=0)
                entries = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids
                tl.store(kept_ptr + cell * KEPT - 1 + places, entries, mask=is_kept)
                tl.store(note_ptr + _FLOOR, floor)
                tl.store(note_ptr + _COUNT, tl.max(places, axis=0).to(tl.float32))


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


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "seeds_ptr",
        "positions_ptr",
    ],
)
def _threshold_kernel(
    logits_ptr,
    best_ptr,  # [B, chunks] float32
    best_id_ptr,  # [B, chunks] int32
    kept_ptr,  # [B, chunks, KEPT] int64: a logit's float32 bits, then its id
    notes_ptr,  # [B, chunks, NOTES] float32
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    limits_ptr,  # [B, 2] float32: the largest logit; the smallest candidate, inf if out is final
    out_ptr,
    logits_stride,
    parameter_stride,
    vocab_size,
    chunks,
    CHUNKS_PAD: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNKS_PAD)
    inside = columns < chunks
    best = tl.load(best_ptr + row * chunks + columns, mask=inside, other=float("-inf"))
    best_id = tl.load(best_id_ptr + row * chunks + columns, mask=inside, other=0x7FFFFFFF)
    highest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == highest, best_id, 0x7FFFFFFF), axis=0)
    temperature = tl.load(temperature_ptr + row * parameter_stride)
    highest = tl.maximum(highest, -3.4028234663852886e38)
    lowest = highest + float("inf")
    if temperature > 0.0:
        temperature = tl.maximum(temperature, 1.0e-30)
        lowest = highest - float("inf")
        at = row * parameter_stride
        if _is_limited(temperature_ptr, top_k_ptr, top_p_ptr, at, vocab_size):
            row_notes_ptr = notes_ptr + row * chunks * _NOTES
            note_ptr = row_notes_ptr + columns * _NOTES
            floor = tl.load(note_ptr + _FLOOR, mask=inside, other=float("-inf"))
            floor = tl.max(floor, axis=0)
            mass = tl.load(note_ptr + _MASS, mask=inside, other=0.0)
            # Not a plain product: the compiler would make an fma of it and the addition of another
            # lane's, of which only the latter is rounded. Totals would then differ between lanes,
            # which would take different branches and wait for each other forever.
            share = tl.exp((best - highest) / temperature)
            total = tl.sum(tl.fma(mass, share, 0.0), axis=0)
            cells = tl.arange(0, CHUNKS_PAD * KEPT)
            count_ptr = row_notes_ptr + cells // KEPT * _NOTES + _COUNT
            count = tl.load(count_ptr, mask=cells < chunks * KEPT, other=0.0)
            is_kept = cells % KEPT < count.to(tl.int32)
            entries = tl.load(kept_ptr + row * chunks * KEPT + cells, mask=is_kept, other=0)
            known = (entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            known = tl.where(is_kept, known, float("-inf"))
            lowest = find_lowest(
                known, floor, total, logits_ptr + row * logits_stride, vocab_size, highest,
                temperature, tl.load(top_k_ptr + at), tl.load(top_p_ptr + at),
                tl.load(min_p_ptr + at), BLOCK, SHIFT,
            )  # fmt: skip
            if lowest >= floor:
                ids = tl.where(is_kept, entries.to(tl.int32), 0x7FFFFFFF)
                seed = tl.load(seeds_ptr + row)
                position = tl.load(positions_ptr + row)
                noisy = (known - highest) / temperature + _gumbel(seed, position, ids)
                noisy = tl.where(known >= lowest, noisy, float("-inf"))
                top = tl.max(noisy, axis=0)
                drawn = tl.min(tl.where(noisy == top, ids, 0x7FFFFFFF), axis=0)
                token = tl.where(top > float("-inf"), drawn, token)  # a row of only -inf has none
                lowest = highest + float("inf")
        else:
            min_p = tl.load(min_p_ptr + at)
            if min_p > 0.0:
                lowest = highest + tl.log(min_p) * temperature
    tl.store(limits_ptr + row * 2, highest)
    tl.store(limits_ptr + row * 2 + 1, lowest)
    tl.store(out_ptr + row, token)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "seeds_ptr", "positions_ptr"])
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
    highest = tl.load(limits_ptr + row * 2)
    lowest = tl.load(limits_ptr + row * 2 + 1)
    if lowest < float("inf"):
        temperature = tl.load(temperature_ptr + row * parameter_stride)
        temperature = tl.maximum(temperature, 1.0e-30)
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        row_ptr = logits_ptr + row * logits_stride
        best = tl.full([STEP], float("-inf"), dtype=tl.float32)
        best_id = chunk * CHUNK + tl.arange(0, STEP)
        for first in range(0, CHUNK, STEP):
            ids = chunk * CHUNK + first + tl.arange(0, STEP)
            scores = load_scores(row_ptr, ids, vocab_size)
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


@triton.jit(do_not_specialize=["chunks"])
def _pick_kernel(
    best_ptr,  # [B, chunks] float32
    best_id_ptr,  # [B, chunks] int32
    limits_ptr,  # [B, 2] float32
    out_ptr,
    chunks,
    CHUNKS_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(limits_ptr + row * 2 + 1) < float("inf"):
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
    kept = torch.empty((rows, chunks, _KEPT), dtype=torch.int64, device=device)
    notes = torch.empty((rows, chunks, _NOTES.value), dtype=torch.float32, device=device)
    limits = torch.empty((rows, 2), dtype=torch.float32, device=device)
    stride, pad = logits.stride(0), next_power_of_2(chunks)
    temperature, top_k, top_p, min_p = _equally_strided(temperature, top_k, top_p, min_p)
    step = temperature.stride(0)
    _chunk_max_kernel[(chunks, rows)](
        logits, temperature, top_k, top_p, best, best_id, stride, step, vocab_size,
        CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    # Programs of rows without limits return at once; with many rows, each has few programs.
    each = 4 if rows >= _MANY_ROWS else 1
    _keep_kernel[(-(-chunks // each), rows)](
        logits, temperature, top_k, top_p, best, best_id, kept, notes, stride, step, vocab_size,
        chunks, CHUNK=chunk, KEPT=_KEPT, CHUNKS_A_PROGRAM=each, num_warps=4,
    )  # fmt: skip
    _threshold_kernel[(rows,)](
        logits, best, best_id, kept, notes, temperature, top_k, top_p, min_p, seeds, positions,
        limits, out, stride, step, vocab_size, chunks,
        CHUNKS_PAD=pad, KEPT=_KEPT, BLOCK=chunk // 2, SHIFT=_SPARE_BITS[logits.dtype], num_warps=16,
    )  # fmt: skip
    # Fewer programs if there are enough rows: most have no work.
    chunk *= 2 if rows >= _MANY_ROWS else 1
    chunks = -(-vocab_size // chunk)
    _draw_kernel[(chunks, rows)](
        logits, temperature, seeds, positions, limits, best, best_id, stride, step,
        vocab_size, CHUNK=chunk, STEP=_DRAW_STEP, num_warps=4,
    )  # fmt: skip
    _pick_kernel[(rows,)](best, best_id, limits, out, chunks, CHUNKS_PAD=pad, num_warps=1)
    return out
