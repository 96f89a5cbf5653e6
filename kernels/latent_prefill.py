# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Attention of long chunks to latent vectors, from which keys and values are made first.

For a query, a head and a token, `latent_attention` multiplies C + R numbers for the score and C for
the sum; keys and values of their own are much shorter (DeepSeek: 192 and 128 numbers instead of 576
and 512), and to make them takes C (N + V) products a token and head, which all queries of a chunk
share.

The contexts of all chunks, one after the other, are taken in parts that fit a workspace. Two
kernels run for each part: one makes keys and values of its tokens, one attends to them. Between
parts, the sums of a query are kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels._launch import next_power_of_2
from pagewire.kernels._scores import LOG2_E
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.latent_sizes import workspace_tokens

_MIN_DOT = 16
_INNER = 64  # numbers of a latent vector that a program multiplies at a time


@triton.jit(do_not_specialize=["part_start", "part_size", "tables_stride"])
def _make_keys_and_values_kernel(
    cache_ptr,
    tables_ptr,
    seq_lens_ptr,
    ends_ptr,  # [B] int32, of each context among all
    key_matrices_ptr,  # [H, N, C]
    value_matrices_ptr,  # [H, C, V]
    keys_ptr,  # [W, H, N]
    values_ptr,  # [W, H, V]
    rotated_ptr,  # [W, R]
    part_start,
    part_size,
    cache_stride_block,
    cache_stride_token,
    tables_stride,
    keys_stride_head,
    keys_stride_out,
    keys_stride_in,
    values_stride_head,
    values_stride_in,
    values_stride_out,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    OUT_PAD: tl.constexpr,  # of a key and of a value
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = (tl.program_id(1) // 2).to(tl.int64)
    is_key = tl.program_id(1) % 2 == 0
    sequence = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + sequence)
    before = tl.load(ends_ptr + sequence) - seq_len - part_start  # of this part's first token
    stop = tl.minimum(seq_len, part_size - before)
    first = tl.maximum(-before, 0) + tl.program_id(0) * BLOCK_M
    if first >= stop:
        return
    tokens = first + tl.arange(0, BLOCK_M)
    inside = tokens < stop
    table = tables_ptr + sequence.to(tl.int64) * tables_stride
    block = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    rows = cache_ptr + block * cache_stride_block + tokens % BLOCK_SIZE * cache_stride_token
    outs = tl.arange(0, OUT_PAD)
    if is_key:
        width = KEY
        stride_in = keys_stride_in
        weights = key_matrices_ptr + head * keys_stride_head + outs * keys_stride_out
    else:
        width = VALUE
        stride_in = values_stride_in
        weights = value_matrices_ptr + head * values_stride_head + outs * values_stride_out
    acc = tl.zeros([BLOCK_M, OUT_PAD], dtype=tl.float32)
    for start in tl.range(0, RANK, BLOCK_K, num_stages=STAGES):
        inner = start + tl.arange(0, BLOCK_K)
        latents = tl.load(
            rows[:, None] + inner[None, :],
            mask=inside[:, None] & (inner < RANK)[None, :],
            other=0.0,
        )
        matrix = tl.load(
            weights[None, :] + inner[:, None] * stride_in,
            mask=(inner < RANK)[:, None] & (outs < width)[None, :],
            other=0.0,
        )
        acc = tl.dot(latents, matrix, acc, input_precision="ieee")
    places = (before + tokens).to(tl.int64)
    mask = inside[:, None] & (outs < width)[None, :]
    made = acc.to(keys_ptr.dtype.element_ty)
    if is_key:
        out = keys_ptr + (places * HEADS + head) * KEY
        tl.store(out[:, None] + outs[None, :], made, mask=mask)
    else:
        out = values_ptr + (places * HEADS + head) * VALUE
        tl.store(out[:, None] + outs[None, :], made, mask=mask)
    if tl.program_id(1) == 0:
        turned = tl.arange(0, ROTATED_PAD)
        key_mask = inside[:, None] & (turned < ROTATED)[None, :]
        key = tl.load(rows[:, None] + RANK + turned[None, :], mask=key_mask, other=0.0)
        tl.store(rotated_ptr + places[:, None] * ROTATED + turned[None, :], key, mask=key_mask)


@triton.jit
def _load_rows(base, places, inside, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
               WIDTH_PAD: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load rows of a workspace; those that are not `inside` are zeros, if `MASKED`."""
    dims = tl.arange(0, WIDTH_PAD)
    rows = base + places[:, None] * STRIDE + dims[None, :]
    if MASKED:
        return tl.load(rows, mask=inside[:, None] & (dims < WIDTH)[None, :], other=0.0)
    if WIDTH < WIDTH_PAD:
        return tl.load(rows, mask=(dims < WIDTH)[None, :], other=0.0)
    return tl.load(rows)


@triton.jit
def _attend_tiles(
    q,
    q_rope,
    acc,
    l_i,
    m_i,
    start,
    stop,
    positions,
    keys,  # of the part's first token; a token's place there is `before` after its position
    rotated,
    values,
    before,
    scale_log2,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        tokens = first + tl.arange(0, BLOCK_N)
        inside = tokens < stop
        places = (before + tokens).to(tl.int64)
        k = _load_rows(keys, places, inside, HEADS * KEY, KEY, KEY_PAD, MASKED)
        k_rope = _load_rows(rotated, places, inside, ROTATED, ROTATED, ROTATED_PAD, MASKED)
        v = _load_rows(values, places, inside, HEADS * VALUE, VALUE, VALUE_PAD, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        if MASKED:
            seen = inside[None, :] & (tokens[None, :] <= positions[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        # Each row has seen its context's first token, in this part or an earlier one.
        m_new = tl.maximum(m_i, tl.max(scores, axis=1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - m_new[:, None])
        rescale = tl.exp2(m_i - m_new)
        l_i = l_i * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["part_start", "part_size"])
def _attend_to_part_kernel(
    q_ptr,
    rope_ptr,
    keys_ptr,
    values_ptr,
    rotated_ptr,
    cu_query_lens_ptr,
    seq_lens_ptr,
    ends_ptr,
    out_ptr,
    sums_ptr,  # [T, H, V] float32, between parts
    limits_ptr,  # [T, H, 2] float32, between parts: highest score, and sum of weights
    scale_log2,
    part_start,
    part_size,
    q_stride_token,
    q_stride_head,
    rope_stride_token,
    rope_stride_head,
    out_stride_token,
    out_stride_head,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(2)
    # The last tile of queries has the longest context: it starts first.
    tile_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    query_start = tl.load(cu_query_lens_ptr + sequence)
    query_len = tl.load(cu_query_lens_ptr + sequence + 1) - query_start
    if tile_start >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + sequence)
    before = tl.load(ends_ptr + sequence) - seq_len - part_start
    first_position = seq_len - query_len + tile_start
    visible = tl.minimum(first_position + BLOCK_M, seq_len)
    start = tl.maximum(-before, 0)
    part_stop = tl.minimum(seq_len, part_size - before)
    stop = tl.minimum(part_stop, visible)
    if start >= stop:
        return

    queries = tile_start + tl.arange(0, BLOCK_M)
    valid = queries < query_len
    positions = seq_len - query_len + queries
    rows = (query_start + queries).to(tl.int64)
    key_dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    turned = tl.arange(0, ROTATED_PAD)
    q_rows = q_ptr + rows * q_stride_token + head * q_stride_head
    q_mask = valid[:, None] & (key_dims < KEY)[None, :]
    q = tl.load(q_rows[:, None] + key_dims[None, :], mask=q_mask, other=0.0)
    rope_rows = rope_ptr + rows * rope_stride_token + head * rope_stride_head
    rope_mask = valid[:, None] & (turned < ROTATED)[None, :]
    q_rope = tl.load(rope_rows[:, None] + turned[None, :], mask=rope_mask, other=0.0)

    cells = rows * HEADS + head
    kept = valid & (start > 0)
    m_i = tl.load(limits_ptr + cells * 2, mask=kept, other=float("-inf"))
    l_i = tl.load(limits_ptr + cells * 2 + 1, mask=kept, other=0.0)
    sum_places = sums_ptr + cells[:, None] * VALUE + value_dims[None, :]
    sum_mask = valid[:, None] & (value_dims < VALUE)[None, :]
    acc = tl.load(sum_places, mask=sum_mask & (start > 0), other=0.0)

    unmasked = tl.maximum(tl.minimum(first_position + 1, stop) - start, 0)
    middle = start + unmasked // BLOCK_N * BLOCK_N  # all rows see all tokens before it
    keys, values = keys_ptr + head * KEY, values_ptr + head * VALUE
    acc, l_i, m_i = _attend_tiles(
        q, q_rope, acc, l_i, m_i, start, middle, positions, keys, rotated_ptr, values, before,
        scale_log2, False, HEADS, KEY, KEY_PAD, VALUE, VALUE_PAD, ROTATED, ROTATED_PAD, BLOCK_N,
        STAGES,
    )  # fmt: skip
    acc, l_i, m_i = _attend_tiles(
        q, q_rope, acc, l_i, m_i, middle, stop, positions, keys, rotated_ptr, values, before,
        scale_log2, True, HEADS, KEY, KEY_PAD, VALUE, VALUE_PAD, ROTATED, ROTATED_PAD, BLOCK_N,
        STAGES,
    )  # fmt: skip
    if visible <= part_stop:
        out_rows = out_ptr + rows * out_stride_token + head * out_stride_head
        result = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_rows[:, None] + value_dims[None, :], result, mask=sum_mask)
    else:
        tl.store(limits_ptr + cells * 2, m_i, mask=valid)
        tl.store(limits_ptr + cells * 2 + 1, l_i, mask=valid)
        tl.store(sum_places, acc, mask=sum_mask)


@dataclass(frozen=True, slots=True)
class _Config:
    """Queries and keys of a tile, warps and stages of attention."""

    block_m: int
    block_n: int
    num_warps: int
    stages: int


def _choose_config(element_size: int, key_pad: int, value_pad: int) -> _Config:
    """Return the tiles for an element's bytes, and padded numbers of a key and of a value."""
    if element_size == 4:  # no tensor cores: tiles that fit into registers
        return _Config(block_m=16, block_n=16, num_warps=4, stages=2)
    if max(key_pad, value_pad) > 128:  # so that shared memory and registers suffice
        return _Config(block_m=64, block_n=64, num_warps=8, stages=2)
    return _Config(block_m=128, block_n=64, num_warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Keys, values and rotated keys of a part, and what is kept of queries between parts."""

    keys: torch.Tensor  # [W, H, N]
    values: torch.Tensor  # [W, H, V]
    rotated: torch.Tensor  # [W, R]
    sums: torch.Tensor  # [T, H, V] float32
    limits: torch.Tensor  # [T, H, 2] float32

    @classmethod
    def allocate(cls, q_nope: torch.Tensor, rotated: int, value_dim: int) -> _Workspace:
        """Allocate the same for each call of a step's size, so that a first step shows the most."""
        tokens, heads, key_dim = q_nope.shape
        size = workspace_tokens(heads, key_dim, value_dim, q_nope.element_size())
        dtype, device = q_nope.dtype, q_nope.device
        return cls(
            torch.empty((size, heads, key_dim), dtype=dtype, device=device),
            torch.empty((size, heads, value_dim), dtype=dtype, device=device),
            torch.empty((size, rotated), dtype=dtype, device=device),
            torch.empty((tokens, heads, value_dim), dtype=torch.float32, device=device),
            torch.empty((tokens, heads, 2), dtype=torch.float32, device=device),
        )


def _check_shapes(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    key_matrices: torch.Tensor,
    value_matrices: torch.Tensor,
) -> None:
    heads, rotated = q_rope.shape[1:]
    rank = cache.shape[2] - rotated
    expected = (heads, q_nope.shape[2], rank)
    if key_matrices.shape != expected or value_matrices.shape[:2] != (heads, rank):
        raise UnsupportedShapeError(
            f"matrices {tuple(key_matrices.shape)} and {tuple(value_matrices.shape)} for {heads} "
            f"heads and latent vectors of {rank}: latent attention needs {expected} and "
            f"{(heads, rank)} with the size of a value"
        )
    if q_nope.stride(2) != 1 or q_rope.stride(2) != 1 or cache.stride(2) != 1:
        raise UnsupportedShapeError("attention needs a last dimension of stride 1")


def latent_prefill(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    key_matrices: torch.Tensor,
    value_matrices: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    chunks: Sequence[tuple[int, int]],
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of packed chunks, with keys and values made of latent vectors.

    Shapes are those of `pagewire.kernels.LatentPrefill`.

    Raises:
        UnsupportedShapeError: the matrices do not fit, or a last dimension has gaps.
    """
    _check_shapes(q_nope, q_rope, cache, key_matrices, value_matrices)
    heads, rotated, value_dim = *q_rope.shape[1:], value_matrices.shape[2]
    key_dim, rank = key_matrices.shape[1:]
    work = _Workspace.allocate(q_nope, rotated, value_dim)
    key_pad, value_pad = (max(_MIN_DOT, next_power_of_2(n)) for n in (key_dim, value_dim))
    config = _choose_config(q_nope.element_size(), key_pad, value_pad)
    ends = seq_lens.cumsum(0, dtype=torch.int32)
    size, total = len(work.keys), sum(context for _, context in chunks)
    longest = max(context for _, context in chunks)
    tiles = -(-max(length for length, _ in chunks) // config.block_m)
    sizes = {
        "HEADS": heads,
        "KEY": key_dim,
        "VALUE": value_dim,
        "ROTATED": rotated,
        "ROTATED_PAD": max(_MIN_DOT, next_power_of_2(rotated)),
    }
    for start in range(0, total, size):
        rows = min(size, longest, total - start)
        _make_keys_and_values_kernel[(-(-rows // config.block_m), 2 * heads, len(chunks))](
            cache,
            block_tables,
            seq_lens,
            ends,
            key_matrices,
            value_matrices,
            work.keys,
            work.values,
            work.rotated,
            start,
            size,
            *cache.stride()[:2],
            block_tables.stride(0),
            *key_matrices.stride(),
            *value_matrices.stride(),
            RANK=rank,
            OUT_PAD=max(key_pad, value_pad),
            BLOCK_SIZE=cache.shape[1],
            BLOCK_M=config.block_m,
            BLOCK_K=min(_INNER, max(_MIN_DOT, next_power_of_2(rank))),
            STAGES=config.stages,
            num_warps=config.num_warps,
            **sizes,
        )
        _attend_to_part_kernel[(heads, tiles, len(chunks))](
            q_nope,
            q_rope,
            work.keys,
            work.values,
            work.rotated,
            cu_query_lens,
            seq_lens,
            ends,
            out,
            work.sums,
            work.limits,
            scale * LOG2_E,
            start,
            size,
            *q_nope.stride()[:2],
            *q_rope.stride()[:2],
            *out.stride()[:2],
            KEY_PAD=key_pad,
            VALUE_PAD=value_pad,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.stages,
            num_warps=config.num_warps,
            **sizes,
        )
