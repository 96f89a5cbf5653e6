"""Inputs that the tests and the benches share: paged caches, packed queries, sampling rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from pagewire.kernels.fp8_numbers import KvScales
from pagewire.kernels.shaping_tables import ShapingRow, ShapingTables, pack_bits

# Layers of the inputs' pool, of which the last one is used: its cache is a strided view.
POOL_LAYERS = 2


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """The arguments of one attention call over a paged KV cache."""

    q: torch.Tensor  # [T, H, D], a strided view of a fused projection
    k_cache: torch.Tensor  # [NB, KH, BS, D], a strided view of the pool
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # [B, max_blocks] int32
    cu_query_lens: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32
    max_query_len: int
    scale: float
    options: dict[str, Any]  # window, soft cap and sinks, as far as the case has them


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Lengths, shapes and options of one attention call; with `kv_scales`, the cache is in FP8."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    kv_scales: KvScales | None = None

    def build(self, device: str, dtype: torch.dtype, poison: bool = True) -> PagedInputs:
        """Return random tensors, the same ones on each device of one kind.

        Args:
            device: device of the tensors.
            dtype: dtype of queries, and of a cache that is not in FP8.
            poison: fill what no sequence owns with NaN: the spare block 0, to which unused table
                entries point, and KV slots past each sequence's end. Likewise KV slots before the
                window of a sequence's first query; table entries of whole blocks there are -1.
        """
        generator = torch.Generator(device).manual_seed(0)
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        blocks = sum(counts) + 1
        shape = (blocks, POOL_LAYERS, 2, self.kv_heads, self.block_size, self.dim)
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
            self._poison_hidden(pool, tables)
        if self.kv_scales is not None:
            pool = pool.to(torch.float8_e4m3fn)
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
            options=self._options(generator),
        )

    def _poison_hidden(self, pool: torch.Tensor, tables: torch.Tensor) -> None:
        if self.window is None:
            return
        for table, query_len, seq_len in zip(tables, self.query_lens, self.seq_lens, strict=True):
            hidden = max(0, seq_len - query_len - self.window + 1)  # positions before all windows
            whole, rest = divmod(hidden, self.block_size)
            pool[table[:whole].long()] = torch.nan
            pool[int(table[whole]), ..., :rest, :] = torch.nan
            table[:whole] = -1

    def _options(self, generator: torch.Generator) -> dict[str, Any]:
        options: dict[str, Any] = {
            "window": self.window,
            "soft_cap": self.soft_cap,
            "kv_scales": self.kv_scales,
        }
        if self.has_sinks:
            options["sinks"] = torch.randn(self.heads, generator=generator, device=generator.device)
        return {name: value for name, value in options.items() if value is not None}


def decode_case(
    seq_lens: tuple[int, ...],
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    block_size: int = 16,
) -> PagedCase:
    """Return a case of one query per sequence; a length of 0 is a padding row."""
    return PagedCase((1,) * len(seq_lens), seq_lens, heads, kv_heads, dim, block_size)


@dataclass(frozen=True, slots=True)
class LatentInputs:
    """Tensors of one call of `LatentAttention`."""

    q_latent: torch.Tensor  # [T, H, C], a strided view, as the next
    q_rope: torch.Tensor  # [T, H, R]
    cache: torch.Tensor  # [NB, BS, C + R], a strided view of the pool
    block_tables: torch.Tensor  # [B, max_blocks] int32
    seq_lens: torch.Tensor  # [B] int32
    scale: float
    cu_query_lens: torch.Tensor  # [B + 1] int32
    lengths: tuple[torch.Tensor, int] | tuple[()]  # cu_query_lens and longest chunk; () for decode


@dataclass(frozen=True, slots=True)
class LatentCase:
    """Lengths and shapes of one call of `LatentAttention`; no query lengths mean decode."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None
    heads: int
    rank: int
    rotated: int
    block_size: int = 16

    def build(self, device: str, dtype: torch.dtype, poison: bool = True) -> LatentInputs:
        """Return random tensors of this case; see `PagedCase.build`."""
        query_lens = self.query_lens or (1,) * len(self.seq_lens)
        dim = self.rank + self.rotated
        x = PagedCase(query_lens, self.seq_lens, self.heads, 1, dim, self.block_size).build(
            device, dtype, poison
        )
        q_latent, q_rope = x.q.split([self.rank, self.rotated], dim=2)
        lengths = () if self.query_lens is None else (x.cu_query_lens, x.max_query_len)
        return LatentInputs(
            q_latent,
            q_rope,
            x.k_cache[:, 0],
            x.block_tables,
            x.seq_lens,
            x.scale,
            x.cu_query_lens,
            lengths,
        )


class LatentChunks(NamedTuple):
    """Arguments of one call of `LatentPrefill`, in their order."""

    q_nope: torch.Tensor  # [T, H, N], a strided view, as the next three
    q_rope: torch.Tensor  # [T, H, R]
    cache: torch.Tensor  # [NB, BS, C + R]
    key_matrices: torch.Tensor  # [H, N, C]
    value_matrices: torch.Tensor  # [H, C, V]
    block_tables: torch.Tensor  # [B, max_blocks] int32
    seq_lens: torch.Tensor  # [B] int32
    cu_query_lens: torch.Tensor  # [B + 1] int32
    chunks: tuple[tuple[int, int], ...]
    scale: float
    out: torch.Tensor  # [T, H, V]


@dataclass(frozen=True, slots=True)
class LatentChunksCase:
    """Chunks whose heads have keys of `key_dim` and values of `value_dim` numbers."""

    case: LatentCase
    key_dim: int
    value_dim: int

    def build(self, device: str, dtype: torch.dtype, poison: bool = True) -> LatentChunks:
        """Return random tensors of this case; see `PagedCase.build`."""
        case, x = self.case, self.case.build(device, dtype, poison)
        generator = torch.Generator(device).manual_seed(1)
        options: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        q = torch.randn(len(x.q_rope), case.heads, self.key_dim + case.rotated, **options)
        rows = self.key_dim + self.value_dim
        matrices = torch.randn(case.heads, rows, case.rank, **options) * case.rank**-0.5
        keys, values = matrices.split([self.key_dim, self.value_dim], dim=1)
        return LatentChunks(
            q[:, :, : self.key_dim],
            q[:, :, self.key_dim :],
            x.cache,
            keys,
            values.transpose(1, 2),
            x.block_tables,
            x.seq_lens,
            x.cu_query_lens,
            tuple(zip(case.query_lens or (), case.seq_lens, strict=True)),
            q.shape[2] ** -0.5,
            torch.empty(len(q), case.heads, self.value_dim, device=device, dtype=dtype),
        )


class SamplingInputs(NamedTuple):
    """Tensors of one sampling call, in the order of `Sample`."""

    logits: torch.Tensor  # [B, V]
    temperature: torch.Tensor  # [B] float32
    top_k: torch.Tensor  # [B] int32
    top_p: torch.Tensor  # [B] float32
    min_p: torch.Tensor  # [B] float32
    seeds: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64


def peaked_logits(rows: int, vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return logits [rows, vocab_size] like those of language models: noise, and some far above it.

    One of 64, at random, is higher by an exponential value, so that a few have most of the mass.
    """
    logits = 2.0 * torch.randn(rows, vocab_size, device=device)
    likely = torch.rand(rows, vocab_size, device=device) < 1 / 64
    heights = 3.0 * torch.empty(rows, vocab_size, device=device).exponential_()
    return torch.where(likely, logits + heights, logits)


def sampling_inputs(
    logits: torch.Tensor,
    temperature: float | list[float] = 0.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    first_seed: int = 0,
) -> SamplingInputs:
    """Return rows for `logits` [B, V]; a parameter has one value for all rows, or one for each."""
    rows, device = logits.shape[0], logits.device

    def column(value: float | list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingInputs(
        logits=logits,
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seeds=torch.arange(first_seed, first_seed + rows, device=device),
        positions=torch.arange(rows, device=device) % 97,
    )


class ShapingInputs(NamedTuple):
    """Tensors of one call of `ShapeLogits`, in its order."""

    logits: torch.Tensor  # [B, V]
    slots: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64
    tables: ShapingTables
    masks: torch.Tensor  # [M, ceil(V / 32)] int32
    mask_of_row: torch.Tensor  # [B] int64


def shaping_inputs(
    logits: torch.Tensor,
    rows: list[ShapingRow],
    prompts: list[list[int]] | None = None,
    allowed: dict[int, list[int]] | None = None,
    masks: dict[int, list[int]] | None = None,
) -> ShapingInputs:
    """Return rows for `logits` [B, V], whose device slots are B - 1, B - 2, ..., 0.

    Args:
        logits: the logits of each row.
        rows: the parameters of each row; its new token comes after its `output`.
        prompts: prompt tokens of each row, `output_start` in number; None if counts do not matter.
        allowed: row -> the tokens that its device slot is limited to.
        masks: row -> the tokens that its mask in this step allows.
    """
    count, vocab_size = logits.shape
    device = logits.device
    tables = ShapingTables.zeros(count, vocab_size, device)
    slots = list(range(count - 1, -1, -1))
    step_masks = torch.zeros((count, -(-vocab_size // 32)), dtype=torch.int32, device=device)
    mask_of_row = torch.full((count,), -1, dtype=torch.int64, device=device)
    for index, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        tables.rows[slot] = torch.from_numpy(row.words())
        prompt = [] if prompts is None else prompts[index]
        output = torch.tensor(row.output, dtype=torch.int64)
        seen = pack_bits([*prompt, *output.tolist()], vocab_size)
        tables.seen[slot] = torch.from_numpy(seen)
        tables.counts[slot] = torch.bincount(output, minlength=vocab_size)
    for index, tokens in (allowed or {}).items():
        tables.allowed[slots[index]] = torch.from_numpy(pack_bits(tokens, vocab_size))
    for place, (index, tokens) in enumerate((masks or {}).items()):
        step_masks[place] = torch.from_numpy(pack_bits(tokens, vocab_size))
        mask_of_row[index] = place
    return ShapingInputs(
        logits=logits,
        slots=torch.tensor(slots, device=device),
        positions=torch.tensor([r.output_start + len(r.output) for r in rows], device=device),
        tables=tables,
        masks=step_masks,
        mask_of_row=mask_of_row,
    )
