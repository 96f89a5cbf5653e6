"""The bench's cases of weights in four bits: INT4 projections, and mixtures in MXFP4 and INT4.

The peer is the same product with weights in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagewire.kernels.bench.case import DTYPE, BenchCase
from pagewire.kernels.bench.expert_cases import MIXTURES
from pagewire.kernels.experts import experts
from pagewire.kernels.four_bits import EXPONENT_BIAS, FourBitWeights
from pagewire.kernels.linear import linear

_GROUPS = {"e2m1": 32, "integers": 128}
_BYTES = {"e2m1": 17 / 32, "integers": 0.5 + 8 / 128}  # of a weight with its part of scale and zero
_MOST_BOUND_BY_BYTES = 256  # tokens
_ROWS = (1, 2, 8, 32, 64, 128, 256, 1024, 8192)
_PROJECTIONS = ((8192, 8192), (4096, 14336))  # out and in features


def linear_cases() -> Iterator[BenchCase]:
    """Yield cases of projections in INT4."""
    yield from (_linear(rows, *shape) for shape in _PROJECTIONS for rows in _ROWS)


def expert_cases() -> Iterator[BenchCase]:
    """Yield cases of known models' experts."""
    for mixture in MIXTURES:
        for kind in _GROUPS:
            yield from (_experts(tokens, kind, *mixture["shape"]) for tokens in mixture["tokens"])


def random_weights(*shape: int, kind: str) -> FourBitWeights:
    """Return weights `[..., out, in]` on the GPU, whose products are of magnitude about 1."""
    group, ins = _GROUPS[kind], shape[-1]
    size = (*shape[:-1], FourBitWeights.row_bytes(ins))
    pairs = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
    scales = (*shape[:-1], -(-ins // group))
    if kind == "e2m1":
        exponent = EXPONENT_BIAS - (9 * ins).bit_length() // 2
        scale = torch.full(scales, exponent, dtype=torch.uint8, device="cuda")
        return FourBitWeights(pairs, scale, ins, group)
    scale = torch.full(scales, 0.2 / ins**0.5, device="cuda")
    zeros = torch.full(scales, 8.0, device="cuda")
    return FourBitWeights(pairs, scale, ins, group, zeros)


def _plain(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE).mul_(shape[-1] ** -0.5)


def _linear(rows: int, outs: int, ins: int) -> BenchCase:
    x = torch.randn(rows, ins, device="cuda", dtype=DTYPE)
    weights, plain = random_weights(outs, ins, kind="integers"), _plain(outs, ins)
    few = rows <= _MOST_BOUND_BY_BYTES
    return BenchCase(
        "four_bit_linear",
        f"{rows} x {ins} to {outs}",
        lambda ops: (ops.four_bit_linear(x, weights),),
        work=_BYTES["integers"] * outs * ins if few else 2.0 * rows * ins * outs,
        unit="TB/s" if few else "TFLOP/s",
        peer=lambda: linear(x, plain),
    )


def _experts(
    tokens: int, kind: str, num_experts: int, top_k: int, hidden: int, inner: int
) -> BenchCase:
    generator = torch.Generator("cuda").manual_seed(0)
    best = torch.randn(tokens, num_experts, device="cuda", generator=generator).topk(top_k)
    chosen, weights = best.indices.int(), best.values.softmax(dim=-1)
    distinct = chosen.unique().numel()
    x = torch.randn(tokens, hidden, device="cuda", dtype=DTYPE)
    gate_up = random_weights(num_experts, 2 * inner, hidden, kind=kind)
    down = random_weights(num_experts, hidden, inner, kind=kind)
    plain = _plain(num_experts, 2 * inner, hidden), _plain(num_experts, hidden, inner)
    few = tokens <= _MOST_BOUND_BY_BYTES
    nbytes = hidden * (3 * distinct * inner * _BYTES[kind] + 4 * tokens)
    return BenchCase(
        "four_bit_experts",
        f"{tokens} x {hidden}, {top_k} of {num_experts} ({distinct} read), {kind}",
        lambda ops: (ops.four_bit_experts(x, chosen, weights, gate_up, down),),
        work=nbytes if few else 6.0 * tokens * top_k * hidden * inner,
        unit="TB/s" if few else "TFLOP/s",
        peer=lambda: experts(x, chosen, weights, *plain),
    )
