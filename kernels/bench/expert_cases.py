"""The bench's cases of mixtures of experts: routing, and the experts of known models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pagewire.kernels import Ops
from pagewire.kernels.bench.case import DTYPE, BenchCase
from pagewire.kernels.reference.route import route as route_by_torch
from pagewire.kernels.routing import Routing

# experts and rule of Qwen3-30B-A3B, gpt-oss-120b and DeepSeek-V3
RULES = {
    "8 of 128": (128, Routing(top_k=8, renormalise=True)),
    "4 of 128": (128, Routing(top_k=4, renormalise=True)),
    "8 of 256 in 4 of 8 groups": (
        256,
        Routing(
            top_k=8,
            scores="sigmoid",
            renormalise=True,
            scale=2.5,
            groups=8,
            top_groups=4,
            group_score="best two",
            corrected=True,
        ),
    ),
}
# (experts, chosen, hidden, inner) of Qwen3-30B-A3B and of Mixtral 8x7B, and tokens
MIXTURES = (
    ((128, 8, 2048, 768), (1, 2, 4, 8, 16, 32, 128, 256, 1024, 8192)),
    ((8, 2, 4096, 14336), (1, 64, 8192)),
)
_MOST_BOUND_BY_BYTES = 256  # tokens


def route_cases() -> Iterator[BenchCase]:
    """Yield cases of routing; the peer is plain torch, with eight launches or more."""
    for name, (num_experts, rule) in RULES.items():
        for tokens in (1, 8, 256, 8192):
            yield _route(f"{tokens} tokens, {name}", tokens, num_experts, rule)


def expert_cases() -> Iterator[BenchCase]:
    """Yield cases of the experts: the unit is TB/s at few tokens, TFLOP/s at many."""
    for shape, numbers in MIXTURES:
        yield from (_experts(tokens, *shape) for tokens in numbers)


def _route(shape: str, tokens: int, num_experts: int, rule: Routing) -> BenchCase:
    logits = torch.randn(tokens, num_experts, device="cuda", dtype=DTYPE)
    correction = torch.randn(num_experts, device="cuda") if rule.corrected else None

    def call(ops: Ops) -> tuple[torch.Tensor, ...]:
        return ops.route(logits, rule, correction)

    def check(ops: Ops) -> tuple[torch.Tensor, ...]:
        chosen, weights = call(ops)
        return (torch.zeros(logits.shape, device="cuda").scatter_(1, chosen.long(), weights),)

    work = float(tokens * (2 * num_experts + 8 * rule.top_k))
    peer = partial(route_by_torch, logits, rule, correction)
    return BenchCase("route", shape, call, work, check=check, peer=peer)


def _experts(tokens: int, num_experts: int, top_k: int, hidden: int, inner: int) -> BenchCase:
    """Return a case with uniform routing from a fixed seed; it names the number of experts read."""
    generator = torch.Generator("cuda").manual_seed(0)
    best = torch.randn(tokens, num_experts, device="cuda", generator=generator).topk(top_k)
    chosen, weights = best.indices.int(), best.values.softmax(dim=-1)
    distinct = chosen.unique().numel()
    x = torch.randn(tokens, hidden, device="cuda", dtype=DTYPE)
    first = (num_experts, 2 * inner, hidden)
    gate_up = torch.randn(first, device="cuda", dtype=DTYPE) / hidden**0.5
    down = torch.randn(num_experts, hidden, inner, device="cuda", dtype=DTYPE) / inner**0.5

    def call(ops: Ops) -> tuple[torch.Tensor, ...]:
        return (ops.experts(x, chosen, weights, gate_up, down),)

    shape = f"{tokens} x {hidden}, {top_k} of {num_experts} ({distinct} read), inner {inner}"
    if tokens <= _MOST_BOUND_BY_BYTES:
        work = 2.0 * hidden * (3 * distinct * inner + 2 * tokens)
        return BenchCase("experts", shape, call, work)
    return BenchCase("experts", shape, call, 6.0 * tokens * top_k * hidden * inner, "TFLOP/s")
