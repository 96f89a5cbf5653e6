"""The bench's cases of experts with weights in four bits: known mixtures, in MXFP4 and in INT4."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagewire.kernels.bench.case import DTYPE, BenchCase
from pagewire.kernels.bench.expert_cases import MIXTURES
from pagewire.kernels.four_bits import EXPONENT_BIAS, FourBitWeights

_GROUPS = {"e2m1": 32, "integers": 128}
_BYTES = {"e2m1": 17 / 32, "integers": 0.5 + 5 / 128}  # of a weight with its part of scale and zero
_MOST_BOUND_BY_BYTES = 256  # tokens


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
    zeros = torch.full(scales, 8, dtype=torch.uint8, device="cuda")
    return FourBitWeights(pairs, scale, ins, group, zeros)


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
    few = tokens <= _MOST_BOUND_BY_BYTES
    nbytes = hidden * (3 * distinct * inner * _BYTES[kind] + 4 * tokens)
    return BenchCase(
        "four_bit_experts",
        f"{tokens} x {hidden}, {top_k} of {num_experts} ({distinct} read), {kind}",
        lambda ops: (ops.four_bit_experts(x, chosen, weights, gate_up, down),),
        work=nbytes if few else 6.0 * tokens * top_k * hidden * inner,
        unit="TB/s" if few else "TFLOP/s",
    )
