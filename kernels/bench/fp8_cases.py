"""The bench's cases of weights in FP8: the projections of an 8B Llama, and known mixtures."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagewire.kernels.bench.case import DTYPE, BenchCase
from pagewire.kernels.bench.expert_cases import MIXTURES
from pagewire.kernels.fp8_numbers import Fp8Weights
from pagewire.kernels.linear import linear

_FORMATS = {"rows": (1, None), "blocks": (128, 128)}
_MOST_BOUND_BY_BYTES = 256  # rows
_ROWS = (1, 8, 32, 64, 256, 8192)
_TOLERANCE = 0.06  # matrix instructions add FP8 less exactly than the reference does
# Inputs of second projections are quantised: what is rounded otherwise becomes the next number.
_TOLERANCE_OF_EXPERTS = 0.15


def linear_cases(shapes: tuple[tuple[int, int], ...]) -> Iterator[BenchCase]:
    """Yield cases of projections of these out and in features; the peer is ours in bf16."""
    for format in _FORMATS:
        for rows in _ROWS:
            yield from (_linear(rows, outs, ins, format) for outs, ins in shapes)


def expert_cases() -> Iterator[BenchCase]:
    """Yield cases of known models' experts."""
    for mixture in MIXTURES:
        for format in _FORMATS:
            yield from (_experts(tokens, format, *mixture["shape"]) for tokens in mixture["tokens"])


def random_weights(*shape: int, format: str) -> Fp8Weights:
    """Return weights `[..., out, in]` on the GPU, whose products are of magnitude about 1."""
    *experts, outs, ins = shape
    rows, columns = _FORMATS[format][0], _FORMATS[format][1] or ins
    numbers = torch.randn(shape, device="cuda", dtype=DTYPE).mul_(64).to(torch.float8_e4m3fn)
    scales = (*experts, -(-outs // rows), -(-ins // columns))
    scale = torch.full(scales, 1 / (64 * ins**0.5), device="cuda")
    return Fp8Weights(numbers, scale, (rows, columns))


def _linear(rows: int, outs: int, ins: int, format: str) -> BenchCase:
    x = torch.randn(rows, ins, device="cuda", dtype=DTYPE)
    weights = random_weights(outs, ins, format=format)
    in_bf16 = torch.randn(outs, ins, device="cuda", dtype=DTYPE)
    few = rows <= _MOST_BOUND_BY_BYTES
    return BenchCase(
        "fp8_linear",
        f"{rows} x {ins} -> {outs}, {format}",
        lambda ops: (ops.fp8_linear(x, weights),),
        work=float(outs * ins + 2 * rows * (ins + outs)) if few else 2.0 * rows * ins * outs,
        unit="TB/s" if few else "TFLOP/s",
        peer=lambda: linear(x, in_bf16),
        tolerance=_TOLERANCE,
    )


def _experts(
    tokens: int, format: str, num_experts: int, top_k: int, hidden: int, inner: int
) -> BenchCase:
    generator = torch.Generator("cuda").manual_seed(0)
    best = torch.randn(tokens, num_experts, device="cuda", generator=generator).topk(top_k)
    chosen, weights = best.indices.int(), best.values.softmax(dim=-1)
    distinct = chosen.unique().numel()
    x = torch.randn(tokens, hidden, device="cuda", dtype=DTYPE)
    gate_up = random_weights(num_experts, 2 * inner, hidden, format=format)
    down = random_weights(num_experts, hidden, inner, format=format)
    few = tokens <= _MOST_BOUND_BY_BYTES
    nbytes = float(hidden * (3 * distinct * inner + 4 * tokens))
    return BenchCase(
        "fp8_experts",
        f"{tokens} x {hidden}, {top_k} of {num_experts} ({distinct} read), {format}",
        lambda ops: (ops.fp8_experts(x, chosen, weights, gate_up, down),),
        work=nbytes if few else 6.0 * tokens * top_k * hidden * inner,
        unit="TB/s" if few else "TFLOP/s",
        tolerance=_TOLERANCE_OF_EXPERTS,
    )
