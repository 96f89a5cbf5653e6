"""The operations of `pagewire.kernels.invariant` in plain torch.

Libraries choose an algorithm for a matrix product by the matrices' shapes. So each product here has
a fixed number of rows, padded with zeros, and attention is computed for one query at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from pagewire.kernels.fp8_numbers import UNSCALED, KvScales
from pagewire.kernels.reference import experts as usual_experts
from pagewire.kernels.reference import four_bit_experts as usual_four_bit_experts
from pagewire.kernels.reference import four_bit_linear as usual_four_bit_linear
from pagewire.kernels.reference import fp8_experts as usual_fp8_experts
from pagewire.kernels.reference import fp8_linear as usual_fp8_linear
from pagewire.kernels.reference import latent_attention as usual_latent_attention
from pagewire.kernels.reference.paged_decode import paged_decode

_ROWS = 16  # of a product, unless the library computes equal rows differently
# Key: a weight's shape, and what else a library may choose an algorithm by.
_rows_of_products: dict[tuple[object, ...], int] = {}


def _rows_of(weight: torch.Tensor) -> int:
    """Return the number of rows of products with a weight `[out, in]`.

    16 if the library computes a row the same way at each place, which is tried out once; else 1.
    """
    key = (weight.shape, weight.stride(), weight.dtype, weight.device, torch.get_num_threads())
    if key not in _rows_of_products:
        row = torch.arange(weight.shape[1], device=weight.device).sin().to(weight.dtype)
        products = F.linear(row.repeat(_ROWS, 1), weight)
        _rows_of_products[key] = (
            _ROWS if torch.equal(products, products[:1].expand(_ROWS, -1)) else 1
        )
    return _rows_of_products[key]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`; see `pagewire.kernels.Linear`."""
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    size = _rows_of(weight)
    for rows, target in zip(x.split(size), out.split(size), strict=True):
        padded = torch.zeros((size, x.shape[1]), dtype=x.dtype, device=x.device)
        padded[: len(rows)] = rows
        target.copy_(F.linear(padded, weight, bias)[: len(rows)])
    return out


def head_products(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each head's rows times its own matrix; see `pagewire.kernels.HeadProducts`."""
    heads = zip(x.unbind(1), weights.unbind(0), strict=True)
    return torch.stack([linear(rows, weight.t()) for rows, weight in heads], dim=1)


experts = partial(usual_experts.experts, product=linear)
fp8_linear = partial(usual_fp8_linear.fp8_linear, product=linear)
fp8_experts = partial(usual_fp8_experts.fp8_experts, product=linear)
four_bit_linear = partial(usual_four_bit_linear.four_bit_linear, product=linear)
four_bit_experts = partial(usual_four_bit_experts.four_bit_experts, product=linear)


def _queries(
    block_tables: torch.Tensor, cu_query_lens: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[slice, torch.Tensor, torch.Tensor]:
    """Return the rows of the queries, and each one's block table and length of context.

    As if each query were a sequence.
    """
    counts = cu_query_lens.diff()
    ends = cu_query_lens[1:].repeat_interleave(counts)
    first, last = int(cu_query_lens[0]), int(cu_query_lens[-1])
    after = ends - 1 - torch.arange(first, last, device=ends.device)  # queries of its sequence
    lengths = seq_lens.repeat_interleave(counts) - after
    return slice(first, last), block_tables.repeat_interleave(counts, dim=0), lengths


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: KvScales = UNSCALED,
    chunks: Sequence[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """Return causal attention of packed query chunks; see `pagewire.kernels.PagedPrefill`."""
    out = torch.empty_like(q) if out is None else out
    own, tables, lengths = _queries(block_tables, cu_query_lens, seq_lens)
    options = (window, soft_cap, sinks, kv_scales)
    paged_decode(q[own], k_cache, v_cache, tables, lengths, scale, out[own], *options)
    return out


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
) -> torch.Tensor:
    """Return attention to latent vectors; see `pagewire.kernels.LatentAttention`."""
    out = torch.empty_like(q_latent) if out is None else out
    own = slice(len(seq_lens))
    if cu_query_lens is not None:
        own, block_tables, seq_lens = _queries(block_tables, cu_query_lens, seq_lens)
    attend = usual_latent_attention.latent_attention
    attend(q_latent[own], q_rope[own], cache, block_tables, seq_lens, scale, out=out[own])
    return out
