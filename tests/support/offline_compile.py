"""Compile the Triton kernels for a Hopper GPU without a GPU; print the resources of each.

    python -P -m pagewire.tests.support.offline_compile [--ops ...] [--dtypes ...] [--all-mixtures]
        [--batch-invariant]

Launchers run on tensors without memory; instead of a launch, Triton compiles the kernel with its
own ptxas. The interpreter, which the tests use, accepts programs that the compiler refuses, and has
no registers or shared memory. Exit code 1: a kernel spills more bytes than `_SPILLS` allows, needs
more shared memory than an SM has, or has a branch at which threads may diverge before a barrier,
see `ptx_uniformity`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from pagewire.kernels import OP_NAMES, Ops, load_ops
from pagewire.kernels._kv_copies import copy_blocks
from pagewire.kernels.all_gather import Columns, all_gather
from pagewire.kernels.all_reduce import all_reduce
from pagewire.kernels.bench.inputs import (
    LatentCase,
    LatentChunksCase,
    PagedCase,
    decode_case,
    sampling_inputs,
    shaping_inputs,
)
from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.fp8_numbers import UNSCALED, Fp8Weights
from pagewire.kernels.gated_silu import GatedSilu
from pagewire.kernels.kv_staging import make_copy_list, packed_bytes
from pagewire.kernels.rank_memory import RankMemory, make_rank_memory
from pagewire.kernels.reduce_norm import reduce_norm
from pagewire.kernels.routing import Routing
from pagewire.kernels.shaping_tables import ShapingRow, ShapingTables
from pagewire.tests.support.ptx_uniformity import find_divergences
from pagewire.tests.support.unlaunched import HopperDriver

_MOST_SHARED = 227 * 1024  # bytes, of a program on a Hopper GPU
# Bytes that a thread of these kernels may spill; benchmarks include these spills.
_SPILLS = {"_hopper_prefill_kernel": 64, "_latent_attention_kernel": 128}
_SPILLS |= {"_paged_prefill_kernel": 192}  # with heads of 256 over a cache in FP8
_SPILLS |= {"_paged_decode_kernel": 16, "_four_bit_product_kernel": 48}  # 2 warps, FP8; 64 rows
_SPILLS |= {"_all_reduce_kernel": 8}  # with Triton 3.6
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):  # it spills more than 3.6 and 3.7
    _SPILLS |= {"_hopper_prefill_kernel": 160, "_each_kernel": 16}
_SPECIALISED = {"_hopper_prefill_kernel"}  # warps take different branches on purpose
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_V3 = Routing(
    top_k=8,
    scores="sigmoid",
    renormalise=True,
    scale=2.5,
    groups=8,
    top_groups=4,
    group_score="best two",
    corrected=True,
)
# experts, hidden size, inner size, routing
MIXTURES = {
    "Qwen3-30B-A3B": (128, 2048, 768, Routing(top_k=8, renormalise=True)),
    "gpt-oss-20b": (32, 2880, 2880, Routing(top_k=4, renormalise=True)),
    "Mixtral-8x7B": (8, 4096, 14336, Routing(top_k=2, renormalise=True)),
    "DeepSeek-V2": (160, 5120, 1536, Routing(top_k=6, groups=8, top_groups=3, scale=16.0)),
    "DeepSeek-V3": (256, 7168, 2048, _V3),
    "tiny": (5, 37, 19, Routing(top_k=3)),
}
# Hopper kernel with one to three warp groups, whole and split contexts, with and without options;
# the kernel of other GPUs.
PREFILLS = (
    PagedCase((2,), (300,)),
    PagedCase((40,), (3000,)),
    PagedCase((40,), (3000,), 16, dim=256, window=2500, soft_cap=50.0, has_sinks=True),
    PagedCase((1000,), (1000,), heads=14, kv_heads=2, dim=64),
    PagedCase((3000,), (3000,)),
    PagedCase((3000,), (3000,), dim=64),
    PagedCase((3000,), (3000,), dim=64, window=100, has_sinks=True),
    PagedCase((3000,), (3000,), 16, dim=256, window=100, soft_cap=50.0),
    PagedCase((200,), (300,), dim=96, window=100),
    *(
        PagedCase((chunk,), (3000,), 16, dim=dim, window=window, soft_cap=cap, kv_scales=UNSCALED)
        for chunk in (2, 1000)
        for dim, window, cap in ((64, 100, None), (128, None, None), (256, 100, 50.0))
    ),
)
DECODES = (
    decode_case((600,) * 2),
    decode_case((4000,) + (1,) * 39),  # divided by their lengths
    *(
        replace(decode_case((600,) * rows, dim=dim), kv_scales=UNSCALED)
        for rows, dim in ((2, 64), (2, 128), (200, 128), (200, 256))
    ),
    replace(decode_case((600,) * 2, heads=64, kv_heads=2), kv_scales=UNSCALED),
)
_GPT_OSS = GatedSilu(alpha=1.702, up_offset=1.0, limit=7.0)

AMONG_RANKS = ("all_reduce", "reduce_norm", "all_gather")  # operations that are not of one backend

Call = Callable[[], object]


class _Compiled:
    """The kernels that launchers asked for, by name, options and constants."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}

    def launcher(self, kernel: Any, grid: Any) -> Callable[..., None]:
        def compile_it(*args: Any, **kwargs: Any) -> None:
            types = [each.dtype if isinstance(each, torch.Tensor) else each for each in args]
            done = kernel.warmup(*types, grid=grid, **kwargs)
            self.kernels.setdefault(f"{kernel.__name__} {done.hash[:8]}", done)

        return compile_it


@contextmanager
def _hopper(compiled: _Compiled) -> Iterator[None]:
    """Make launchers see a Hopper GPU, and launches only compile."""
    driver.set_active(HopperDriver())
    seen = {
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
        "get_device_capability": lambda device=None: (9, 0),
    }
    with (
        patch.multiple(torch.cuda, **seen),
        patch.object(torch.version, "cuda", torch.version.cuda or "13.0"),
        patch.object(KernelInterface, "__getitem__", lambda *args: compiled.launcher(*args)),
        FakeTensorMode(),
    ):
        yield


def _emptied(value: Any, device: str) -> Any:
    """Return tensors without memory in place of a tensor or of tables; only in fake tensor mode."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if isinstance(value, Fp8Weights | FourBitWeights | RankMemory | Columns):
        return type(value)(*(_emptied(each, device) for each in value))
    if isinstance(value, ShapingTables):
        return ShapingTables(*(_emptied(table, device) for table in value))
    return value


def _mixtures(ops: Ops, dtype: torch.dtype, names: list[str]) -> Iterator[tuple[str, Call]]:
    def routed(tokens: int, experts: int, rule: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        correction = torch.empty(experts, device="cuda") if rule.corrected else None
        logits = torch.empty(tokens, experts, device="cuda", dtype=dtype)
        return ops.route(logits, rule, correction)

    def run(tokens: int, experts: int, hidden: int, inner: int, rule: Routing, oss: bool) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.empty(experts, *shape, device="cuda", dtype=dtype)

        biases = (weight(2 * inner), weight(hidden)) if oss else (None, None)
        chosen = torch.empty(tokens, rule.top_k, device="cuda", dtype=torch.int32)
        x = torch.empty(tokens, hidden, device="cuda", dtype=dtype)
        parameters = (weight(2 * inner, hidden), weight(hidden, inner), *biases)
        activation = (_GPT_OSS, True) if oss else ()
        ops.experts(x, chosen, chosen.float(), *parameters, *activation)

    for name in names:
        experts, hidden, inner, rule = MIXTURES[name]
        for tokens in (1, 16, 256, 8192) if len(names) > 1 else (1, 256, 8192):
            yield "route", lambda t=tokens, e=experts, r=rule: routed(t, e, r)
            shape = (experts, hidden, inner, rule, name.startswith("gpt-oss"))
            yield "experts", lambda t=tokens, s=shape: run(t, *s)


def _attention(ops: Ops, dtype: torch.dtype) -> Iterator[tuple[str, Any, list[Any]]]:
    for case in DECODES:
        x = case.build("cpu", dtype, poison=False)
        context = [x.q, x.k_cache, x.v_cache, x.block_tables]
        options = [None, None, None, None, case.kv_scales or UNSCALED]
        yield "paged_decode", ops.paged_decode, [*context, x.seq_lens, x.scale, *options]
    for case in PREFILLS:
        x = case.build("cpu", dtype, poison=False)
        context = [x.q, x.k_cache, x.v_cache, x.block_tables]
        lengths = [x.cu_query_lens, x.seq_lens, x.max_query_len]
        options = [x.options.get(name) for name in ("window", "soft_cap", "sinks")]
        options.append(case.kv_scales or UNSCALED)
        yield "paged_prefill", ops.paged_prefill, [*context, *lengths, x.scale, None, *options]
        if case.kv_scales is not None:
            chunks = list(zip(case.query_lens, case.seq_lens, strict=True))
            copies = [*context[1:], *lengths[:2], chunks, dtype, case.kv_scales.values, case.window]
            yield "paged_prefill", lambda *args: list(copy_blocks(*args)), copies
    for chunks in (None, (40, 40)):
        y = LatentCase((300, 300), chunks, 16, 512, 64).build("cpu", dtype)
        context = [y.q_latent, y.q_rope, y.cache, y.block_tables, y.seq_lens]
        yield "latent_attention", ops.latent_attention, [*context, y.scale, *y.lengths]
    z = LatentCase((300, 400), (300, 400), 16, 512, 64)
    for dims in ((128, 128), (192, 256)):
        x = LatentChunksCase(z, *dims).build("cpu", dtype)
        yield "latent_prefill", ops.latent_prefill, list(x)
    caches = torch.empty(8, 2, 8, 16, 128, dtype=dtype).unbind(1)
    q, kv = torch.empty(2, 32, 128, dtype=dtype), torch.empty(2, 8, 128, dtype=dtype)
    slots, cos_sin = torch.zeros(2, dtype=torch.int64), torch.empty(64, 128)
    norm = torch.empty(128, dtype=dtype)
    for each in (caches, [cache.to(torch.float8_e4m3fn) for cache in caches]):
        tail: list[Any] = [cos_sin, *each, slots, norm, norm, 1e-6]
        yield "rotary_and_cache", ops.rotary_and_cache, [slots, q, kv, kv, *tail]
    cached, norm = torch.empty(2, 576, dtype=dtype), torch.empty(512, dtype=dtype)
    args: list[Any] = [slots, torch.empty(2, 16, 64, dtype=dtype), cached[:, :512], cached[:, 512:]]
    args += [torch.empty(64, 64), torch.empty(8, 16, 576, dtype=dtype), slots, norm, 1e-6, True]
    yield "latent_rotary_and_cache", ops.latent_rotary_and_cache, args


def _others(ops: Ops, dtype: torch.dtype) -> Iterator[tuple[str, Any, list[Any]]]:
    x = torch.empty(2, 4096, dtype=dtype)
    yield "rms_norm", ops.rms_norm, [x, x[0], 1e-5, x]
    yield "linear", ops.linear, [x, torch.empty(1024, 4096, dtype=dtype), None]
    heads = torch.empty(2, 16, 128, dtype=dtype), torch.empty(16, 128, 512, dtype=dtype)
    yield "head_products", ops.head_products, list(heads)
    yield "silu_and_mul", ops.silu_and_mul, [x]
    yield "gelu_and_mul", ops.gelu_and_mul, [x]
    logits = torch.empty(2, 32000, dtype=dtype)
    penalised = ShapingRow(4, repetition=1.1, frequency=0.2, bad_words=[[1, 2]], output=[5])
    shaping = shaping_inputs(logits, [penalised] * 2)
    yield "shape_logits", ops.shape_logits, list(shaping)
    tokens = torch.zeros(2, dtype=torch.int64)
    slots, rows = shaping.slots, shaping.positions
    yield "enter_tokens", ops.enter_tokens, [shaping.tables, slots, slots, slots, tokens, 2]
    yield "record_tokens", ops.record_tokens, [shaping.tables, tokens, slots, rows]
    yield "sample", ops.sample, list(sampling_inputs(logits))
    yield "token_logprobs", ops.token_logprobs, [logits, rows, tokens, 20]
    pool, copy_list = torch.empty(8, 4096, dtype=dtype), make_copy_list(range(4), 1)
    staging = torch.empty(packed_bytes(4, 4096 * dtype.itemsize), dtype=torch.uint8)
    yield "pack_blocks", ops.pack_blocks, [pool, copy_list, staging]
    corrupt = torch.zeros((), dtype=torch.int64)
    yield "unpack_blocks", ops.unpack_blocks, [staging, pool, copy_list, corrupt]


def _quantised(ops: Ops, dtype: torch.dtype) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield products with weights in FP8, a scale for each row or block, and in four bits."""

    def weights(*shape: int, block: tuple[int, int]) -> Fp8Weights:
        scales = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        numbers = torch.empty(shape, dtype=torch.float8_e4m3fn)
        return Fp8Weights(numbers, torch.empty(scales), block)

    chosen = torch.zeros(300, 8, dtype=torch.int32)
    for rows, columns in ((1, None), (128, 128)):
        odd = weights(1000, 4096, block=(rows, columns or 4096))  # for cuBLAS and for few rows
        even = weights(1024, 4096, block=(rows, columns or 4096))
        for count, own in ((2, odd), (300, odd), (2, even), (64, even)):
            yield "fp8_linear", ops.fp8_linear, [torch.empty(count, 4096, dtype=dtype), own]
        first = weights(16, 2048, 1024, block=(rows, columns or 1024))
        second = weights(16, 1024, 1024, block=(rows, columns or 1024))
        for count in (2, 300):
            routed = [chosen[:count], chosen[:count].float(), first, second]
            yield "fp8_experts", ops.fp8_experts, [torch.empty(count, 1024, dtype=dtype), *routed]
    for kind in ("e2m1", "integers", "in any order"):
        both = [_in_four_bits(kind, *shape) for shape in ((16, 2, 2048, 1024), (16, 1, 1024, 1024))]
        tail: list[Any] = [_GPT_OSS, True] if kind == "e2m1" else []
        if kind != "in any order":
            for count in (1, 30, 60, 100, 300):
                x = torch.empty(count, 1024, dtype=dtype)
                yield "four_bit_linear", ops.four_bit_linear, [x, both[0].expert(0)]
        for count in (2, 300):
            routed = [chosen[:count], chosen[:count].float(), *both, *tail]
            x = torch.empty(count, 1024, dtype=dtype)
            yield "four_bit_experts", ops.four_bit_experts, [x, *routed]


def _among_ranks(ops: Ops, dtype: torch.dtype) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield exchanges of few and of many values, whose launches overlap and do not."""
    cpu = torch.device("cpu")
    for ranks in (2, 8):
        memory = make_rank_memory(1, range(ranks), cpu, 5.0)
        for tokens in (1, 256):
            yield "all_reduce", all_reduce, [torch.empty(tokens, 4096, dtype=dtype), memory]
            if tokens == 1:
                x = torch.empty(tokens, 4096, dtype=dtype)
                for residual in (None, x):
                    yield "reduce_norm", reduce_norm, [x, x[0], 1e-5, residual, memory]
            columns = Columns.of((16032,) * ranks, cpu)
            x = torch.empty(tokens, 16032, dtype=dtype)
            yield "all_gather", all_gather, [x, columns, memory]


def _in_four_bits(kind: str, experts: int, parts: int, outs: int, ins: int) -> FourBitWeights:
    pairs = torch.empty(experts, outs, ins // 2, dtype=torch.uint8)
    scale = torch.empty(experts, outs, ins // 32)
    if kind == "e2m1":
        return FourBitWeights(pairs, scale.byte(), ins, 32)
    order = torch.empty(experts, parts, ins, dtype=torch.int32)
    return FourBitWeights(pairs, scale, ins, 32, scale, order if kind == "in any order" else None)


def _resources(kernel: Any) -> dict[str, int]:
    """Return registers and spilled bytes per thread, and bytes of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    spilled = found["STACK"] + found["LOCAL"]
    return {"registers": found["REG"], "spilled": spilled, "shared": kernel.metadata.shared}


def main(arguments: list[str] | None = None) -> int:
    """Compile, print one line per kernel, and return the exit code."""
    names = (*OP_NAMES, *AMONG_RANKS)
    parser = argparse.ArgumentParser(description="Compile the kernels for sm_90 without a GPU.")
    parser.add_argument("--ops", nargs="+", choices=names, default=names)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument(
        "--all-mixtures", action="store_true", help="all of `MIXTURES`, not only one"
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="compile that mode's kernels"
    )
    options = parser.parse_args(arguments)
    compiled, ops = _Compiled(), load_ops("triton", "cuda", options.batch_invariant)
    dtypes = [getattr(torch, name) for name in options.dtypes]
    cases = [
        each
        for dtype in dtypes
        for part in (_attention, _others, _quantised, _among_ranks)
        for each in part(ops, dtype)
    ]
    mixtures = list(MIXTURES) if options.all_mixtures else ["Qwen3-30B-A3B"]
    with _hopper(compiled):
        for op, call, args in cases:
            # torch without CUDA cannot view a CUDA tensor as another dtype.
            device = "cpu" if op in ("pack_blocks", "unpack_blocks") else "cuda"
            if op in options.ops:
                call(*(_emptied(each, device) for each in args))
        for op, run in (each for dtype in dtypes for each in _mixtures(ops, dtype, mixtures)):
            if op in options.ops:
                run()
    failed = False
    for name, kernel in compiled.kernels.items():
        took = _resources(kernel)
        kind = name.split()[0]
        parting = [] if kind in _SPECIALISED else find_divergences(kernel.asm["ptx"])
        is_wrong = took["spilled"] > _SPILLS.get(kind, 0) or took["shared"] > _MOST_SHARED
        is_wrong |= bool(parting)
        failed |= is_wrong
        print(name, *(f"{what} {n}" for what, n in took.items()), "WRONG" if is_wrong else "ok")
        for each in parting:
            print(f"  {each}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
