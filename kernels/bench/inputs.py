"""Inputs that the tests and the benches share: paged caches, packed queries, sampling rows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate

import torch

# Of a pool with this many layers, the last one is used: its cache is a strided view.
_LAYERS = 2


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Tensors of one attention call."""

    q: torch.Tensor  # [T, H, D], a strided view of a fused projection
    k_cache: torch.Tensor  # [NB, KH, BS, D], a strided view of the pool
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # [B, max_blocks] int32
    cu_query_lens: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32
    max_query_len: int
    scale: float


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Lengths and shapes of one attention call."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16

    def build(
        self, device: str, dtype: torch.dtype, poison: bool = True, seed: int = 0
    ) -> PagedInputs:
        """Draw the tensors.

        Args:
            device: Where they live.
            dtype: Of queries and cache.
            poison: Fill what no sequence owns with NaN: the spare block 0, to which unused table
                entries point, and KV slots past each sequence's end.
            seed: Of the draw.
        """
        generator = torch.Generator(device).manual_seed(seed)
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        blocks = sum(counts) + 1
        shape = (blocks, _LAYERS, 2, self.kv_heads, self.block_size, self.dim)
        pool = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        order = torch.randperm(blocks - 1, generator=generator, device=device).int() + 1
        tables = torch.zeros(len(counts), max(counts) + 2, dtype=torch.int32, device=device)
        for row, stop in enumerate(accumulate(counts)):
            tables[row, : counts[row]] = order[stop - counts[row] : stop]
            used = self.seq_lens[row] % self.block_size
            if poison and used:
                pool[int(order[stop - 1]), ..., used:, :] = torch.nan
        if poison:
            pool[0] = torch.nan
        width = self.heads + 2 * self.kv_heads
        tokens = sum(self.query_lens)
        fused = torch.randn(
            (tokens, width, self.dim), generator=generator, device=device, dtype=dtype
        )
        starts = [0, *accumulate(self.query_lens)]
        return PagedInputs(
            q=fused[:, : self.heads],
            k_cache=pool[:, -1, 0],
            v_cache=pool[:, -1, 1],
            block_tables=tables,
            cu_query_lens=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32, device=device),
            max_query_len=max(self.query_lens),
            scale=self.dim**-0.5,
        )


def decode_case(
    seq_lens: tuple[int, ...],
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    block_size: int = 16,
) -> PagedCase:
    """Return a case of one query per sequence (a padding row of length 0 has one, too)."""
    return PagedCase((1,) * len(seq_lens), seq_lens, heads, kv_heads, dim, block_size)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Tensors of one sampling call, in the order of `Sample`."""

    logits: torch.Tensor  # [B, V]
    temperature: torch.Tensor  # [B] float32
    top_k: torch.Tensor  # [B] int32
    top_p: torch.Tensor  # [B] float32
    seeds: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """All of them, as `Sample` takes them."""
        return tuple(getattr(self, field.name) for field in fields(self))


def sampling_inputs(
    logits: torch.Tensor,
    temperature: float | list[float] = 0.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    first_seed: int = 0,
) -> SamplingInputs:
    """Return rows for `logits` [B, V]; a parameter is one for all rows or a list of one each."""
    rows, device = logits.shape[0], logits.device

    def column(value: float | list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingInputs(
        logits=logits,
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        seeds=torch.arange(first_seed, first_seed + rows, device=device),
        positions=torch.arange(rows, device=device) % 97,
    )
