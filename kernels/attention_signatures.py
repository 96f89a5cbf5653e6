# ruff: noqa: D102 - each protocol says in its own docstring what the call does
"""Signatures of the attention operations; the shapes' letters are those of `pagewire.kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pagewire.kernels.fp8_numbers import UNSCALED, KvScales

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class PagedDecode(Protocol):
    """One query token per sequence against its paged context (split-KV flash decoding).

    A sequence of length 0 has zeros as output. Length -1 marks a row without a sequence: its row of
    `out` is not written.

    With a window, a query at position p sees positions p - window + 1 to p only; blocks that no
    query of the sequence sees are not read, nor is their entry in the block table. With a soft cap,
    a score s (after `scale`) becomes `soft_cap * tanh(s / soft_cap)`. A head's sink is a further
    score, without a value: it is a part of the sum by which the weights are divided.

    Numbers of caches in FP8 are multiplied by their scale.
    """

    def __call__(
        self,
        q: torch.Tensor,  # [B, H, D]
        k_cache: torch.Tensor,  # [NB, KH, BS, D]
        v_cache: torch.Tensor,  # [NB, KH, BS, D]
        block_tables: torch.Tensor,  # [B, max_blocks] int32
        seq_lens: torch.Tensor,  # [B] int32, the current token included
        scale: float,
        out: torch.Tensor | None = None,  # [B, H, D]
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,  # [H] float
        kv_scales: KvScales = UNSCALED,
    ) -> torch.Tensor: ...


class PagedPrefill(Protocol):
    """Causal attention of packed query chunks over their paged context, cached prefix included.

    Query i of a sequence with `query_len` queries and `seq_len` context tokens stands at position
    `seq_len - query_len + i` and sees all positions up to its own. The chunk's own keys and values
    are already in the cache. Rows of `out` before `cu_query_lens[0]` and from `cu_query_lens[-1]`
    on are left as they are. Window, soft cap, sinks and scales are those of `PagedDecode`. Long
    chunks over a cache in FP8 are faster if the host knows their lengths.
    """

    def __call__(
        self,
        q: torch.Tensor,  # [T, H, D]
        k_cache: torch.Tensor,  # [NB, KH, BS, D]
        v_cache: torch.Tensor,  # [NB, KH, BS, D]
        block_tables: torch.Tensor,  # [B, max_blocks] int32
        cu_query_lens: torch.Tensor,  # [B + 1] int32, first row of each sequence, end of the last
        seq_lens: torch.Tensor,  # [B] int32
        max_query_len: int,
        scale: float,
        out: torch.Tensor | None = None,  # [T, H, D]
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,  # [H] float
        kv_scales: KvScales = UNSCALED,
        chunks: Sequence[tuple[int, int]] | None = None,  # length and context of each
    ) -> torch.Tensor: ...


class LatentAttention(Protocol):
    """Causal attention of all heads to one latent vector a token, over its paged context.

    Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form: a score is
    `q_latent . c + q_rope . k`, of the token's latent vector c and its rotated key k, which are the
    first C and the last R numbers of its row in the cache. The result is the weighted sum of latent
    vectors.

    Without `cu_query_lens`, each sequence has one query, its last token; lengths of 0 and -1 are
    those of `PagedDecode`. With it, queries are packed, and stand in their sequences as those of
    `PagedPrefill`; other rows of `out` are left as they are. The step's own rows are already in the
    cache.

    Raises:
        UnsupportedShapeError: C or R is out of bounds, or a last dimension has gaps.
    """

    def __call__(
        self,
        q_latent: torch.Tensor,  # [T, H, C], any strides with stride(-1) == 1, as those below
        q_rope: torch.Tensor,  # [T, H, R], rotated
        cache: torch.Tensor,  # [NB, BS, C + R]
        block_tables: torch.Tensor,  # [B, max_blocks] int32
        seq_lens: torch.Tensor,  # [B] int32
        scale: float,
        cu_query_lens: torch.Tensor | None = None,  # [B + 1] int32
        max_query_len: int = 1,
        out: torch.Tensor | None = None,  # [T, H, C]
    ) -> torch.Tensor: ...  # [T, H, C]


class LatentPrefill(Protocol):
    """Causal attention of packed chunks, whose context's keys and values are computed first.

    The same as `LatentAttention`, but for rounding, with `q_latent = q_nope @ key_matrices` and the
    result `values @ value_matrices`. A head's key of a token is `key_matrices @ c` and the rotated
    key, its value `c @ value_matrices`, each rounded to the cache's dtype. Other rows of `out` are
    left as they are. The host knows the lengths, so no CUDA graph captures this.

    Raises:
        UnsupportedShapeError: the matrices do not fit, or a last dimension has gaps.
    """

    def __call__(
        self,
        q_nope: torch.Tensor,  # [T, H, N], any strides with stride(-1) == 1, as the next two
        q_rope: torch.Tensor,  # [T, H, R], rotated
        cache: torch.Tensor,  # [NB, BS, C + R]
        key_matrices: torch.Tensor,  # [H, N, C], any strides, as the next
        value_matrices: torch.Tensor,  # [H, C, V]
        block_tables: torch.Tensor,  # [B, max_blocks] int32
        seq_lens: torch.Tensor,  # [B] int32
        cu_query_lens: torch.Tensor,  # [B + 1] int32
        chunks: Sequence[tuple[int, int]],  # length and context of each, as in the tensors
        scale: float,
        out: torch.Tensor,  # [T, H, V]
    ) -> None: ...


class LatentRotaryAndCache(Protocol):
    """Rotate q in place; write normalised latent vectors and rotated keys into their KV slots.

    A row of the cache is the latent vector, RMS-normalised as `RmsNorm` does it with a row, then
    the key. KV slot -1 is skipped. Rotation is in float32, of pairs that are R/2 apart as in
    `RotaryAndCache`; interleaved, of each number with the next, and pairs stay where they are.
    """

    def __call__(
        self,
        positions: torch.Tensor,  # [T] int64
        q: torch.Tensor,  # [T, H, R], any strides with stride(-1) == 1, as those below
        latent: torch.Tensor,  # [T, C]
        k: torch.Tensor,  # [T, R]
        cos_sin_cache: torch.Tensor,  # [max_position, R] float32: cos in [:R/2], sin in [R/2:]
        cache: torch.Tensor,  # [NB, BS, C + R]
        slot_mapping: torch.Tensor,  # [T] int64
        norm: torch.Tensor,  # [C], weight of the normalisation
        eps: float,
        interleaved: bool = False,
    ) -> None: ...
