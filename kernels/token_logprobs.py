# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Log probabilities of tokens and of the most likely ones, from raw logits.

There are two small launches. The first finds, per row and chunk of the vocabulary, the largest
logit, the sum of exponentials, the number of logits above the token's, and the most likely tokens.
The second joins these per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import next_power_of_2
from pagewire.kernels._score_keys import id_of, score_of, to_keys

_CHUNK = 4096
# Columns of the most likely tokens, for any requested number: one compilation serves all.
_MOST_TOP = 32


@triton.jit
def _load_scores(row_ptr, ids, vocab_size):
    """Logits as float32: NaN and what lies past the vocabulary -inf, +inf the largest float."""
    scores = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    return tl.minimum(scores, 3.4028234663852886e38)


@triton.jit
def _load_score(row_ptr, token, vocab_size):
    """A token's logit, as `_load_scores` has it; -inf for an id that is not a token."""
    return _load_scores(row_ptr, tl.where(token >= 0, token, vocab_size), vocab_size)


@triton.jit(
    do_not_specialize=["top"],
    do_not_specialize_on_alignment=["rows_ptr", "tokens_ptr", "mass_ptr"],
)
def _chunk_kernel(
    logits_ptr,
    rows_ptr,  # [N] int64
    tokens_ptr,  # [B] int64
    highest_ptr,  # [N, chunks] float32
    mass_ptr,  # [N, chunks] float32
    better_ptr,  # [N, chunks] int32
    keys_ptr,  # [N, chunks, MOST_TOP] int64
    logits_stride,
    vocab_size,
    top,
    CHUNK: tl.constexpr,
    MOST_TOP: tl.constexpr,
):
    chunk = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index)
    row_ptr = logits_ptr + row * logits_stride
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = _load_scores(row_ptr, ids, vocab_size)
    token_score = _load_score(row_ptr, tl.load(tokens_ptr + row), vocab_size)
    # A finite maximum, so that a chunk of -inf has the mass 0.
    highest = tl.maximum(tl.max(scores, axis=0), -3.4028234663852886e38)
    cell = index * tl.num_programs(0) + chunk
    tl.store(highest_ptr + cell, highest)
    tl.store(mass_ptr + cell, tl.sum(tl.exp(scores - highest), axis=0))
    tl.store(better_ptr + cell, tl.sum((scores > token_score).to(tl.int32), axis=0))
    keys = to_keys(scores, ids)
    for place in range(top):
        best = tl.max(keys, axis=0)
        tl.store(keys_ptr + cell * MOST_TOP + place, best)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)


@triton.jit(
    do_not_specialize=["top"],
    do_not_specialize_on_alignment=["rows_ptr", "tokens_ptr", "mass_ptr"],
)
def _join_kernel(
    logits_ptr,
    rows_ptr,  # [N] int64
    tokens_ptr,  # [B] int64
    highest_ptr,  # [N, chunks] float32
    mass_ptr,  # [N, chunks] float32
    better_ptr,  # [N, chunks] int32
    keys_ptr,  # [N, chunks, MOST_TOP] int64
    ids_ptr,  # [N, 1 + top] int32
    logprobs_ptr,  # [N, 1 + top] float32
    ranks_ptr,  # [N] int32
    logits_stride,
    vocab_size,
    chunks,
    top,
    CHUNKS_PAD: tl.constexpr,
    MOST_TOP: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNKS_PAD)
    inside = columns < chunks
    start = index * chunks
    highest = tl.load(highest_ptr + start + columns, mask=inside, other=-3.4028234663852886e38)
    mass = tl.load(mass_ptr + start + columns, mask=inside, other=0.0)
    better = tl.load(better_ptr + start + columns, mask=inside, other=0)
    peak = tl.max(highest, axis=0)
    # The highest logit's own share is 1, unless all logits are -inf.
    log_sum = tl.log(tl.maximum(tl.sum(mass * tl.exp(highest - peak), axis=0), 1.0))
    row = tl.load(rows_ptr + index)
    token = tl.load(tokens_ptr + row)
    score = _load_score(logits_ptr + row * logits_stride, token, vocab_size)
    out = index * (1 + top)
    tl.store(ids_ptr + out, token.to(tl.int32))
    tl.store(logprobs_ptr + out, tl.where(score == float("-inf"), score, score - peak - log_sum))
    tl.store(ranks_ptr + index, tl.sum(better, axis=0) + 1)
    cells = tl.arange(0, CHUNKS_PAD * MOST_TOP)
    is_key = (cells // MOST_TOP < chunks) & (cells % MOST_TOP < top)
    lowest = tl.full([CHUNKS_PAD * MOST_TOP], -0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
    keys = tl.load(keys_ptr + start * MOST_TOP + cells, mask=is_key, other=0)
    keys = tl.where(is_key, keys, lowest)
    for place in range(top):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, lowest, keys)
        value = score_of(best)
        value = tl.where(value == float("-inf"), value, value - peak - log_sum)
        tl.store(ids_ptr + out + 1 + place, id_of(best))
        tl.store(logprobs_ptr + out + 1 + place, value)


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, log probabilities and ranks.

    Shapes and meaning are those of `pagewire.kernels.TokenLogprobs`.
    """
    count, vocab_size, device = rows.shape[0], logits.shape[1], logits.device
    ids = torch.empty((count, 1 + top), dtype=torch.int32, device=device)
    logprobs = torch.empty((count, 1 + top), dtype=torch.float32, device=device)
    ranks = torch.empty(count, dtype=torch.int32, device=device)
    if count == 0:
        return ids, logprobs, ranks
    chunk = min(_CHUNK, max(next_power_of_2(vocab_size), _MOST_TOP))
    chunks = -(-vocab_size // chunk)
    highest, mass = torch.empty((2, count, chunks), dtype=torch.float32, device=device)
    better = torch.empty((count, chunks), dtype=torch.int32, device=device)
    keys = torch.empty((count, chunks, _MOST_TOP), dtype=torch.int64, device=device)
    stride = logits.stride(0)
    _chunk_kernel[(chunks, count)](
        logits, rows, tokens, highest, mass, better, keys, stride, vocab_size, top,
        CHUNK=chunk, MOST_TOP=_MOST_TOP, num_warps=8,
    )  # fmt: skip
    _join_kernel[(count,)](
        logits, rows, tokens, highest, mass, better, keys, ids, logprobs, ranks, stride,
        vocab_size, chunks, top, CHUNKS_PAD=next_power_of_2(chunks), MOST_TOP=_MOST_TOP,
        num_warps=8,
    )  # fmt: skip
    return ids, logprobs, ranks
