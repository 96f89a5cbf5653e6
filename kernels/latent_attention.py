# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged attention of all heads to one latent vector a token: decode and prefill by one kernel.

A row of a program's tile is one head of one query. All rows attend to the same rows of the cache. A
tile reads each of them once: the whole row is the key, its first part the value. Decode steps split
the context; `_decode_splits.py` divides it and combines the splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagewire.kernels._decode_splits import (
    Division,
    SplitResults,
    combine_splits,
    divide,
    find_split,
    padded_rows,
)
from pagewire.kernels._launch import (
    await_predecessor,
    next_power_of_2,
    overlap_options,
    sm_count,
)
from pagewire.kernels._scores import LOG2_E
from pagewire.kernels.errors import UnsupportedShapeError

_MOST_USUAL = 32  # splits of each context; more take longer to combine
_RESIDENT = 2  # programs of an SM: its registers hold two
_MIN_DOT = 16
_MANY_ROWS = 17  # and more take larger tiles
MAX_RANK = 512
MAX_ROTATED = 128


@triton.jit(do_not_specialize=["sequences", "further", "most", "tables_stride"])
def _latent_attention_kernel(
    q_ptr,
    rope_ptr,
    cache_ptr,
    tables_ptr,
    cu_query_lens_ptr,  # [B + 1]; None: one query a sequence
    seq_lens_ptr,
    out_ptr,  # [T, H, C], written if there is a single split
    partial_ptr,  # of `SplitResults`, like the next two
    lse_ptr,
    splits_ptr,
    sequences,
    further,
    most,
    scale_log2,
    q_stride_token,
    q_stride_head,
    rope_stride_token,
    rope_stride_head,
    cache_stride_block,
    cache_stride_token,
    tables_stride,
    out_stride_token,
    out_stride_head,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SINGLE: tl.constexpr,
    EVEN: tl.constexpr,
    SEQUENCES: tl.constexpr,  # at least `sequences`
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # The last tile of queries has the longest context: it starts first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    await_predecessor(OVERLAPS)
    if SINGLE:
        sequence, split, splits, place = tl.program_id(1), 0, 1, tl.program_id(1)
    else:
        sequence, split, splits, place = find_split(
            seq_lens_ptr, splits_ptr, sequences, further, most, TILE, 0, EVEN, SEQUENCES
        )
        if sequence >= sequences:
            return
    seq_len = tl.load(seq_lens_ptr + sequence)
    if seq_len < 0:
        return
    if cu_query_lens_ptr is None:
        query_start = sequence
        query_len = 1
    else:
        query_start = tl.load(cu_query_lens_ptr + sequence)
        query_len = tl.load(cu_query_lens_ptr + sequence + 1) - query_start
    if first_row >= query_len * HEADS:
        return
    last_query = (first_row + BLOCK_M - 1) // HEADS
    visible = tl.minimum(seq_len - query_len + last_query + 1, seq_len)
    split_len = tl.cdiv(tl.cdiv(visible, TILE), splits) * TILE
    start = split * split_len
    stop = tl.minimum(start + split_len, visible)
    if (start >= visible) & (split > 0):
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    valid = rows < query_len * HEADS
    positions = seq_len - query_len + rows // HEADS
    tokens_of_rows = (query_start + rows // HEADS).to(tl.int64)
    heads = (rows % HEADS).to(tl.int64)
    dims = tl.arange(0, RANK_PAD)
    turned = tl.arange(0, ROTATED_PAD)
    row_mask = valid[:, None] & (dims < RANK)[None, :]
    q_rows = q_ptr + tokens_of_rows * q_stride_token + heads * q_stride_head
    q = tl.load(q_rows[:, None] + dims[None, :], mask=row_mask, other=0.0)  # [M, C]
    rope_rows = rope_ptr + tokens_of_rows * rope_stride_token + heads * rope_stride_head
    rope_mask = valid[:, None] & (turned < ROTATED)[None, :]
    q_rope = tl.load(rope_rows[:, None] + turned[None, :], mask=rope_mask, other=0.0)  # [M, R]
    table = tables_ptr + sequence.to(tl.int64) * tables_stride

    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_PAD], dtype=tl.float32)
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        tokens = first + tl.arange(0, TILE)
        inside = tokens < stop
        block = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        cached = cache_ptr + block * cache_stride_block + tokens % BLOCK_SIZE * cache_stride_token
        latents = tl.load(
            cached[:, None] + dims[None, :],
            mask=inside[:, None] & (dims < RANK)[None, :],
            other=0.0,
        )  # [TILE, C]
        keys = tl.load(
            cached[:, None] + RANK + turned[None, :],
            mask=inside[:, None] & (turned < ROTATED)[None, :],
            other=0.0,
        )  # [TILE, R]
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")  # [M, TILE]
        scores = tl.dot(q_rope, tl.trans(keys), scores, input_precision="ieee")
        seen = inside[None, :] & (tokens[None, :] <= positions[:, None])
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        # Each row sees a split's first position.
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        p = tl.exp2(scores - m_new[:, None])
        rescale = tl.exp2(m_i - m_new)
        l_i = l_i * rescale + tl.sum(p, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(p.to(latents.dtype), latents, acc, input_precision="ieee")
        m_i = m_new

    # An empty sequence has an `l_i` of 0 and yields zeros.
    safe_l = tl.where(l_i > 0.0, l_i, 1.0)
    result = acc / safe_l[:, None]
    if splits == 1:
        out_rows = out_ptr + tokens_of_rows * out_stride_token + heads * out_stride_head
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_rows[:, None] + dims[None, :], out, mask=row_mask)
    else:
        cells = place.to(tl.int64) * HEADS + heads
        partial_rows = partial_ptr + cells * RANK
        tl.store(partial_rows[:, None] + dims[None, :], result, mask=row_mask)
        tl.store(lse_ptr + cells, m_i + tl.log2(safe_l), mask=valid)


@dataclass(frozen=True, slots=True)
class _Config:
    """Tile sizes and launch options; see `paged_prefill` for stages."""

    block_m: int
    tile: int
    num_warps: int
    stages: int


def _choose_config(rows: int, element_size: int) -> _Config:
    """Return the tiles for a number of rows (heads times longest chunk) and an element size.

    A tile's sums are `[block_m, C]` in float32: 32 KiB of registers for 16 rows of 512 numbers.
    """
    if element_size == 4:
        return _Config(block_m=16, tile=16, num_warps=4, stages=2)
    if rows < _MANY_ROWS:
        return _Config(block_m=16, tile=32, num_warps=4, stages=3)
    return _Config(block_m=64, tile=32, num_warps=8, stages=3)


def _check_shapes(q_latent: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor) -> None:
    rank, rotated = q_latent.shape[2], q_rope.shape[2]
    if rank > MAX_RANK or rotated > MAX_ROTATED or cache.shape[2] != rank + rotated:
        raise UnsupportedShapeError(
            f"rows of {cache.shape[2]} numbers for a latent vector of {rank} and a key of "
            f"{rotated}: latent attention needs both, at most {MAX_RANK} and {MAX_ROTATED}"
        )
    if q_latent.stride(2) != 1 or q_rope.stride(2) != 1 or cache.stride(2) != 1:
        raise UnsupportedShapeError("attention needs a last dimension of stride 1")


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    cu_query_lens: torch.Tensor | None = None,
    max_query_len: int = 1,
    out: torch.Tensor | None = None,
    one_tiling: bool = False,
) -> torch.Tensor:
    """Causal attention of all heads to one latent vector a token, over its paged context.

    Shapes are those of `pagewire.kernels.LatentAttention`; `max_query_len` sizes the grid and must
    be at least every sequence's query length. With `one_tiling`, tiles are the same in all batches.

    Raises:
        UnsupportedShapeError: C is above 512 or R above 128, or a last dimension has gaps.
    """
    _check_shapes(q_latent, q_rope, cache)
    out = torch.empty_like(q_latent) if out is None else out
    heads, rank = q_latent.shape[1:]
    sequences, block_size = seq_lens.shape[0], cache.shape[1]
    if sequences == 0 or max_query_len == 0:
        return out
    rows = _MANY_ROWS if one_tiling else heads * max_query_len
    config = _choose_config(rows, q_latent.element_size())
    row_tiles = -(-heads * max_query_len // config.block_m)
    division = Division(1, True, 0, 1)
    if cu_query_lens is None:
        tiles = max(1, -(-block_tables.shape[1] * block_size // config.tile))
        sms = sm_count(cache.device)
        division = divide(sequences, row_tiles, tiles, sms, _RESIDENT, _MOST_USUAL)
    further = division.further
    results = SplitResults.empty(sequences, further, out) if further else None
    _latent_attention_kernel[(row_tiles, sequences + further)](
        q_latent,
        q_rope,
        cache,
        block_tables,
        cu_query_lens,
        seq_lens,
        out,
        *(results or (out, out, out)),  # unused without a split
        sequences,
        further,
        division.most,
        scale * LOG2_E,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        *cache.stride()[:2],
        block_tables.stride(0),
        *out.stride()[:2],
        HEADS=heads,
        RANK=rank,
        RANK_PAD=max(_MIN_DOT, next_power_of_2(rank)),
        ROTATED=q_rope.shape[2],
        ROTATED_PAD=max(_MIN_DOT, next_power_of_2(q_rope.shape[2])),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        TILE=config.tile,
        SINGLE=results is None,
        EVEN=division.is_even,
        SEQUENCES=1 if division.is_even else padded_rows(sequences),
        STAGES=config.stages,
        num_warps=config.num_warps,
        **overlap_options(cache.device, sequences * max_query_len, 0 if one_tiling else 4),
    )
    if results is not None:
        combine_splits(results, seq_lens, out, division, config.tile)
    return out
