"""Attention over a grid of shapes and lengths, next to FlashAttention 3 where vLLM has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from pagewire.kernels import Ops
from pagewire.kernels.bench.case import DTYPE, TABLES, BenchCase, Call
from pagewire.kernels.bench.inputs import POOL_LAYERS, PagedCase, PagedInputs, decode_case
from pagewire.kernels.bench.peers import flash_attention_3

MOST_KV_BYTES = 64e9  # size of one case's pool


class GridShape(NamedTuple):
    """A layer's query and KV heads, their size, and the window and soft cap of its attention."""

    heads: int
    kv_heads: int
    dim: int = 128
    window: int | None = None
    soft_cap: float | None = None

    def __str__(self) -> str:
        text = f"{self.heads}/{self.kv_heads} heads of {self.dim}"
        text += "" if self.window is None else f", window {self.window}"
        return text if self.soft_cap is None else f"{text}, cap {self.soft_cap:g}"


# 1, 2, 4, 7 and 8 query heads per KV head; then other sizes, windows and soft caps
SHAPES = [GridShape(**shape) for shape in TABLES["grid"]["shapes"]]
# (sequences, context) and (tokens of a chunk, context)
DECODE, PREFILL = TABLES["grid"]["decode"], TABLES["grid"]["prefill"]


def kv_bytes(tokens: int, shape: GridShape) -> int:
    """Return the bytes of a layer's keys and values of some tokens, in the bench's dtype."""
    return 2 * tokens * shape.kv_heads * shape.dim * DTYPE.itemsize


def grid_cases() -> Iterator[BenchCase]:
    """Yield each shape with each prefill length, and each decode length within `MOST_KV_BYTES`."""
    for shape in SHAPES:
        for batch, context in DECODE:
            if POOL_LAYERS * kv_bytes(batch * context, shape) <= MOST_KV_BYTES:
                yield _decode(shape, batch, context)
        yield from (_prefill(shape, *lengths) for lengths in PREFILL)


def _with(shape: GridShape, case: PagedCase) -> PagedCase:
    return replace(case, **shape._asdict())


def attend(x: PagedInputs, is_decode: bool) -> Call:
    """Return a call of attention to paged KV."""
    context = x.q, x.k_cache, x.v_cache, x.block_tables

    def call(ops: Ops) -> tuple[torch.Tensor, ...]:
        if is_decode:
            return (ops.paged_decode(*context, x.seq_lens, x.scale, **x.options),)
        lengths = x.cu_query_lens, x.seq_lens, x.max_query_len
        return (ops.paged_prefill(*context, *lengths, x.scale, **x.options),)

    return call


def _decode(shape: GridShape, batch: int, context: int) -> BenchCase:
    # Without poison: FlashAttention also reads positions that the window hides.
    x = _with(shape, decode_case((context,) * batch)).build("cuda", DTYPE, poison=False)
    small = _with(shape, decode_case((min(context, 2048), 77))).build("cuda", DTYPE)
    seen = min(context, shape.window or context)
    return BenchCase(
        "paged_decode",
        f"{batch} x {context}, {shape}",
        attend(x, is_decode=True),
        float(kv_bytes(batch * seen, shape)),
        check=attend(small, is_decode=True),
        peer=flash_attention_3(x),
    )


def _prefill(shape: GridShape, chunk: int, context: int) -> BenchCase:
    x = _with(shape, PagedCase((chunk,), (context,))).build("cuda", DTYPE, poison=False)
    small = _with(shape, PagedCase((300, 1), (1700, 900))).build("cuda", DTYPE)
    return BenchCase(
        "paged_prefill",
        f"{chunk} of {context}, {shape}",
        attend(x, is_decode=False),
        4.0 * visible_pairs(chunk, context, shape.window) * shape.heads * shape.dim,
        "TFLOP/s",
        check=attend(small, is_decode=False),
        peer=flash_attention_3(x),
    )


def visible_pairs(chunk: int, context: int, window: int | None) -> int:
    """Return the number of pairs of query and key; the chunk is the end of the context."""
    most = window or context
    return sum(min(end, most) for end in range(context - chunk + 1, context + 1))
