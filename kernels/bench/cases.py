"""The cases that the bench times, of every operation: mostly on the shapes of an 8B Llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from pagewire.kernels import Ops, load_ops
from pagewire.kernels.bench import four_bit_cases, fp8_cases, rank_cases
from pagewire.kernels.bench.attention_grid import attend, grid_cases, visible_pairs
from pagewire.kernels.bench.case import DTYPE, TABLES, BenchCase, Call
from pagewire.kernels.bench.expert_cases import expert_cases, route_cases
from pagewire.kernels.bench.inputs import (
    LatentCase,
    LatentChunksCase,
    LatentInputs,
    PagedCase,
    decode_case,
    peaked_logits,
    sampling_inputs,
    shaping_inputs,
)
from pagewire.kernels.bench.peers import flash_attention_3
from pagewire.kernels.fp8_numbers import UNSCALED
from pagewire.kernels.kv_staging import make_copy_list, packed_bytes
from pagewire.kernels.shaping_tables import ShapingRow, ShapingTables

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256
# 32-bit words of a block over all 32 layers: 2 MiB. Its layer groups of four layers are moved.
BLOCK_WORDS = 1 << 19
GROUPS = 8
TOKENS = (1, 128, 8192)
# (out, in) of a layer's projections and of the vocabulary's
PROJECTIONS = (
    ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
    (VOCABULARY, HIDDEN),
)
# (batch, context) of decode and (chunk, context) of prefill
DECODE, PREFILL = TABLES["decode"], TABLES["prefill"]
# heads of DeepSeek-V2-Lite and of V2; sizes of a latent vector and of a rotated key
LATENT_HEADS, RANK, ROTATED = (16, 128), 512, 64
# temperature, top-k, top-p, min-p
SAMPLING: dict[str, tuple[float, int, float, float]] = {
    name: tuple(row) for name, row in TABLES["sampling"].items()
}
SHAPING = {
    "nothing": ShapingRow(),
    "penalties": ShapingRow(1000, repetition=1.1, frequency=0.2, presence=0.3, output=range(500)),
    "300 biases": ShapingRow(biases={37 * n: 1.0 for n in range(300)}),
    "bad words": ShapingRow(1000, bad_words=[[n, n + 1] for n in range(100)], output=range(500)),
}


def _decode(batch: int, context: int, longest: int | None = None) -> BenchCase:
    lengths = (context,) * (batch - 1) + (longest or context,)
    x = decode_case(lengths).build("cuda", DTYPE)
    shape = f"{batch} x {context}" + (f", one of them {longest}" if longest else "")
    work, call = 4.0 * sum(lengths) * KV_HEADS * DIM, attend(x, is_decode=True)
    return BenchCase("paged_decode", shape, call, work, peer=flash_attention_3(x))


def _kv_in_fp8() -> Iterator[BenchCase]:
    """Yield cases of attention over a cache in FP8; the peer is ours over one in bf16."""
    ops = load_ops("triton", "cuda")
    for batch, context in DECODE:
        case = decode_case((context,) * batch)
        x, plain = (each.build("cuda", DTYPE) for each in (_in_fp8(case), case))
        shape, work = f"{batch} x {context}, FP8", 2.0 * batch * context * KV_HEADS * DIM
        peer = partial(attend(plain, is_decode=True), ops)
        yield BenchCase("paged_decode", shape, attend(x, is_decode=True), work, peer=peer)
    for chunk, context in PREFILL:
        case = PagedCase((chunk,), (context,))
        x, plain = (each.build("cuda", DTYPE) for each in (_in_fp8(case), case))
        x.options["chunks"] = ((chunk, context),)
        work = 4.0 * visible_pairs(chunk, context, None) * HEADS * DIM
        call, peer = attend(x, is_decode=False), partial(attend(plain, is_decode=False), ops)
        shape = f"{chunk} of {context}, FP8"
        yield BenchCase("paged_prefill", shape, call, work, "TFLOP/s", peer=peer)


def _in_fp8(case: PagedCase) -> PagedCase:
    return replace(case, kv_scales=UNSCALED)


def _prefill(chunk: int, context: int) -> BenchCase:
    x = PagedCase((chunk,), (context,)).build("cuda", DTYPE)
    work = 4.0 * visible_pairs(chunk, context, None) * HEADS * DIM
    call, peer = attend(x, is_decode=False), flash_attention_3(x)
    return BenchCase("paged_prefill", f"{chunk} of {context}", call, work, "TFLOP/s", peer=peer)


def _latent_attend(x: LatentInputs) -> Call:
    metadata = (x.block_tables, x.seq_lens, x.scale, *x.lengths)
    return lambda ops: (ops.latent_attention(x.q_latent, x.q_rope, x.cache, *metadata),)


def _latent_decode(heads: int, batch: int, context: int) -> BenchCase:
    x = LatentCase((context,) * batch, None, heads, RANK, ROTATED).build("cuda", DTYPE)
    work = 2.0 * batch * context * (RANK + ROTATED)
    shape = f"{batch} x {context}, {heads} heads"
    return BenchCase("latent_attention", shape, _latent_attend(x), work)


def _latent_prefill(heads: int, chunk: int, context: int) -> BenchCase:
    x = LatentCase((context,), (chunk,), heads, RANK, ROTATED).build("cuda", DTYPE)
    work = 2.0 * visible_pairs(chunk, context, None) * heads * (2 * RANK + ROTATED)
    shape = f"{chunk} of {context}, {heads} heads"
    return BenchCase("latent_attention", shape, _latent_attend(x), work, "TFLOP/s")


def _latent_chunks(heads: int, chunk: int, context: int) -> BenchCase:
    case = LatentChunksCase(LatentCase((context,), (chunk,), heads, RANK, ROTATED), DIM, DIM)
    x = case.build("cuda", DTYPE)
    attending = visible_pairs(chunk, context, None) * (2 * DIM + ROTATED)
    work = 2.0 * heads * (attending + context * RANK * 2 * DIM)
    shape = f"{chunk} of {context}, {heads} heads"

    def call(ops: Ops) -> tuple[torch.Tensor]:
        ops.latent_prefill(*x)
        return (x.out,)

    return BenchCase("latent_prefill", shape, call, work, "TFLOP/s")


def _latent_rotary_and_cache(tokens: int, heads: int) -> BenchCase:
    pool = torch.zeros(1024, 2, 1, 1, BLOCK_SIZE, RANK + ROTATED, device="cuda", dtype=DTYPE)
    queries = torch.randn(tokens, heads, 192, device="cuda", dtype=DTYPE)
    cached = torch.randn(tokens, RANK + ROTATED, device="cuda", dtype=DTYPE)
    norm = torch.randn(RANK, device="cuda", dtype=DTYPE)
    positions = torch.arange(tokens, device="cuda")
    slots = torch.randperm(pool.shape[0] * BLOCK_SIZE, device="cuda")[:tokens]
    angles = 6 * torch.rand(tokens, ROTATED // 2, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)

    def run(ops: Ops, q: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = (positions, q[:, :, -ROTATED:], cached[:, :RANK], cached[:, RANK:], cos_sin)
        ops.latent_rotary_and_cache(*inputs, pool[:, 1, 0, 0], slots, norm, 1e-6, True)
        return q, pool

    return BenchCase(
        "latent_rotary_and_cache",
        f"{tokens} tokens, {heads} heads",
        lambda ops: run(ops, queries, pool),
        work=4.0 * tokens * (heads * ROTATED + RANK + ROTATED),
        check=lambda ops: run(ops, queries.clone(), torch.zeros_like(pool)),
    )


def _rms_norm(tokens: int) -> BenchCase:
    x, residual = torch.randn(2, tokens, HIDDEN, device="cuda", dtype=DTYPE)
    weight = torch.randn(HIDDEN, device="cuda", dtype=DTYPE)

    return BenchCase(
        "rms_norm",
        f"{tokens} x {HIDDEN} + residual",
        lambda ops: ops.rms_norm(x, weight, 1e-5, residual),
        work=8.0 * tokens * HIDDEN,
    )


def _gated(op: Literal["silu_and_mul", "gelu_and_mul"], tokens: int) -> BenchCase:
    x = torch.randn(tokens, 2 * INTERMEDIATE, device="cuda", dtype=DTYPE)
    shape, work = f"{tokens} x {INTERMEDIATE}", 6.0 * tokens * INTERMEDIATE
    return BenchCase(op, shape, lambda ops: (getattr(ops, op)(x),), work)


def _rotary_and_cache(tokens: int, rotated: int = DIM, normed: bool = False) -> BenchCase:
    pool = torch.zeros(1024, 2, 2, KV_HEADS, BLOCK_SIZE, DIM, device="cuda", dtype=DTYPE)
    fused = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=DTYPE)
    positions = torch.arange(tokens, device="cuda")
    slots = torch.randperm(pool.shape[0] * BLOCK_SIZE, device="cuda")[:tokens]
    angles = 6 * torch.rand(tokens, rotated // 2, device="cuda")
    cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    q_norm, k_norm = torch.randn(2, DIM, device="cuda", dtype=DTYPE) if normed else (None, None)

    def run(ops: Ops, x: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = x.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        caches = pool[:, 1, 0], pool[:, 1, 1]
        inputs = (positions, q, k, v, cos_sin_cache, *caches, slots)
        ops.rotary_and_cache(*inputs, q_norm, k_norm, 1e-6)
        return q, pool

    return BenchCase(
        "rotary_and_cache",
        f"{tokens} tokens"
        + ", heads normalised" * normed
        + f", {rotated} of {DIM}" * (rotated < DIM),
        lambda ops: run(ops, fused, pool),
        work=4.0 * tokens * (HEADS + 2 * KV_HEADS) * DIM,
        check=lambda ops: run(ops, fused.clone(), torch.zeros_like(pool)),
    )


def _linear(rows: int, outs: int, ins: int) -> BenchCase:
    x = torch.randn(rows, ins, device="cuda", dtype=DTYPE)
    weight = torch.randn(outs, ins, device="cuda", dtype=DTYPE) / ins**0.5
    return BenchCase(
        "linear",
        f"{rows} x {ins} to {outs}",
        lambda ops: (ops.linear(x, weight),),
        work=2.0 * outs * ins,
        peer=lambda: F.linear(x, weight),
    )


def _sample(rows: int, kind: str, peaked: bool = False, dtype: torch.dtype = DTYPE) -> BenchCase:
    noise = 3 * torch.randn(rows, VOCABULARY, device="cuda")
    logits = peaked_logits(rows, VOCABULARY, "cuda") if peaked else noise
    x = sampling_inputs(logits.to(dtype), *SAMPLING[kind])
    shape = f"{rows} rows, {kind}" + ", peaked" * peaked + ", float32" * (dtype == torch.float32)
    work = float(dtype.itemsize) * rows * VOCABULARY
    return BenchCase("sample", shape, lambda ops: (ops.sample(*x),), work, tolerance=0.0)


def _samples(rows: int) -> Iterator[BenchCase]:
    yield from (_sample(rows, kind) for kind in SAMPLING)
    for kind in ("top-p 0.9", "min-p 0.05"):
        yield _sample(rows, kind, peaked=True)
        yield _sample(rows, kind, peaked=True, dtype=torch.float32)


def _shape_logits(rows: int, kind: str) -> BenchCase:
    logits = (3 * torch.randn(rows, VOCABULARY, device="cuda")).to(DTYPE)
    x = shaping_inputs(logits, [SHAPING[kind]] * rows, [list(range(1000))] * rows)
    return BenchCase(
        "shape_logits",
        f"{rows} rows, {kind}",
        lambda ops: (ops.shape_logits(*x),),
        work=6.0 * rows * VOCABULARY,
        check=lambda ops: (ops.shape_logits(*x).clamp(min=-1e3),),  # no -inf: differences are NaN
    )


def _record_tokens(rows: int) -> BenchCase:
    logits = torch.zeros(rows, VOCABULARY, device="cuda", dtype=DTYPE)
    x = shaping_inputs(logits, [SHAPING["penalties"]] * rows)
    tokens = torch.randint(VOCABULARY, (rows,), device="cuda")

    def run(ops: Ops, tables: ShapingTables) -> tuple[torch.Tensor, ...]:
        ops.record_tokens(tables, tokens, x.slots, x.positions)
        return tables.counts, tables.seen, tables.rows

    def check(ops: Ops) -> tuple[torch.Tensor, ...]:
        return run(ops, ShapingTables(*(table.clone() for table in x.tables)))

    call = partial(run, tables=x.tables)
    return BenchCase("record_tokens", f"{rows} rows", call, 16.0 * rows, check=check, tolerance=0.0)


def _sampling_step(rows: int, kind: str | None) -> BenchCase:
    """Return a case of all work after the logits, with a kind of `SHAPING`; None is without it."""
    logits = peaked_logits(rows, VOCABULARY, "cuda").to(DTYPE)
    sampling = sampling_inputs(logits, *SAMPLING["top-p 0.9"])[1:]
    shaping = SHAPING[kind or "nothing"]
    x = shaping_inputs(logits, [shaping] * rows, [list(range(1000))] * rows)
    noted = ShapingTables(*(table.clone() for table in x.tables))  # so that all runs are alike

    def call(ops: Ops) -> tuple[torch.Tensor, ...]:
        if kind is None:
            return (ops.sample(logits, *sampling),)
        shaped = ops.shape_logits(*x)
        tokens = ops.sample(shaped, *sampling)
        ops.record_tokens(noted, tokens, x.slots, x.positions)
        return (tokens,)

    shape = f"{rows} rows, top-p 0.9" + (f", {kind}" if kind else "")
    work = (2.0 if kind is None else 10.0) * rows * VOCABULARY
    return BenchCase("sampling_step", shape, call, work, tolerance=0.0)


def _enter_tokens(length: int) -> BenchCase:
    tables = ShapingTables.zeros(8, VOCABULARY, "cuda")
    slots, ends = torch.tensor([3], device="cuda"), torch.tensor([length], device="cuda")
    starts = ends // 2
    tokens = torch.randint(VOCABULARY, (length,), device="cuda")

    def call(ops: Ops) -> tuple[torch.Tensor, ...]:
        ops.enter_tokens(tables, slots, ends, starts, tokens, length)
        return tables.seen, tables.counts

    work = 4.25 * VOCABULARY + 8.0 * length
    return BenchCase("enter_tokens", f"{length} tokens", call, work, tolerance=0.0)


def _token_logprobs(rows: int, top: int) -> BenchCase:
    logits = (3 * torch.randn(rows, VOCABULARY, device="cuda")).to(DTYPE)
    wanted = torch.arange(rows, device="cuda")
    tokens = torch.randint(VOCABULARY, (rows,), device="cuda")
    return BenchCase(
        "token_logprobs",
        f"{rows} rows, top {top}",
        lambda ops: ops.token_logprobs(logits, wanted, tokens, top),
        work=2.0 * rows * VOCABULARY,
    )


def _kv_pack(count: int) -> Iterator[BenchCase]:
    rows, words = count * GROUPS, BLOCK_WORDS // GROUPS
    pool = torch.randint(-(2**31), 2**31 - 1, (640 * GROUPS, words), device="cuda").int()
    ids = torch.randperm(pool.shape[0])[:rows].tolist()
    copy_list = make_copy_list(ids, seed=1).to("cuda")
    size = packed_bytes(rows, words * 4)
    staging = torch.zeros(size, dtype=torch.uint8, device="cuda")
    corrupt = torch.zeros((), dtype=torch.int64, device="cuda")
    case = partial(
        BenchCase,
        shape=f"{count} x 2 MiB by layer group",
        work=8.0 * count * BLOCK_WORDS,
        tolerance=0.0,
    )

    def pack(ops: Ops, staging: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ops.pack_blocks(pool, copy_list, staging)
        return (staging,)

    def unpack(ops: Ops, *blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pool, staging, corrupt = blocks
        ops.unpack_blocks(staging, pool, copy_list, corrupt)
        return corrupt, pool

    yield case(
        "pack_blocks",
        call=lambda ops: pack(ops, staging),
        check=lambda ops: pack(ops, torch.empty_like(staging)),
    )
    yield case(
        "unpack_blocks",
        call=lambda ops: unpack(ops, pool, staging, corrupt),
        check=lambda ops: unpack(
            ops, torch.zeros_like(pool), staging.clone(), torch.zeros_like(corrupt)
        ),
    )


# Iterators, so that a caller can free one case's tensors before the next one's are made.
CASES: dict[str, Callable[[], Iterator[BenchCase]]] = {
    "paged_decode": lambda: (_decode(*each) for each in (*DECODE, *TABLES["decode_mixed"])),
    "paged_prefill": lambda: (_prefill(*lengths) for lengths in PREFILL),
    "kv_in_fp8": _kv_in_fp8,
    "attention_grid": grid_cases,
    "latent_attention": lambda: (
        case
        for heads in LATENT_HEADS
        for make, shapes in ((_latent_decode, DECODE), (_latent_prefill, PREFILL[:2]))
        for case in (make(heads, *lengths) for lengths in shapes)
    ),
    "latent_prefill": lambda: (
        _latent_chunks(LATENT_HEADS[0], *lengths) for lengths in TABLES["latent_prefill"]
    ),
    "latent_rotary_and_cache": lambda: (
        _latent_rotary_and_cache(tokens, heads) for heads in LATENT_HEADS for tokens in TOKENS
    ),
    "rms_norm": lambda: (_rms_norm(tokens) for tokens in TOKENS),
    "silu_and_mul": lambda: (_gated("silu_and_mul", tokens) for tokens in TOKENS),
    "gelu_and_mul": lambda: (_gated("gelu_and_mul", tokens) for tokens in TOKENS),
    "rotary_and_cache": lambda: (
        _rotary_and_cache(tokens, *options)
        for options in ((), (DIM, True), (DIM * 3 // 4,))
        for tokens in TOKENS
    ),
    "linear": lambda: (_linear(rows, *shape) for rows in (1, 16, 32) for shape in PROJECTIONS),
    "fp8_linear": lambda: fp8_cases.linear_cases(PROJECTIONS),
    "route": route_cases,
    "experts": expert_cases,
    "fp8_experts": fp8_cases.expert_cases,
    "four_bit_linear": four_bit_cases.linear_cases,
    "four_bit_experts": four_bit_cases.expert_cases,
    "shape_logits": lambda: (
        _shape_logits(rows, kind) for rows in (1, 64, 256) for kind in SHAPING
    ),
    "enter_tokens": lambda: (_enter_tokens(length) for length in (100, 8192, 131072)),
    "record_tokens": lambda: (_record_tokens(rows) for rows in (1, 256)),
    "sample": lambda: (case for rows in (1, 64, 256) for case in _samples(rows)),
    "sampling_step": lambda: (
        _sampling_step(rows, kind) for rows in (64, 256) for kind in (None, *SHAPING)
    ),
    "token_logprobs": lambda: (
        _token_logprobs(rows, top) for rows in (1, 64, 256) for top in (0, 1, 20)
    ),
    "kv_pack": lambda: (case for count in (8, 512) for case in _kv_pack(count)),
    "all_reduce": rank_cases.reduce_cases,
    "all_gather": rank_cases.gather_cases,
}
