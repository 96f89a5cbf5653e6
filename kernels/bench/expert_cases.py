"""The bench's cases of mixtures of experts: routing, and the experts of known models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pagewire.kernels import Ops
from pagewire.kernels.bench.case import DTYPE, TABLES, BenchCase
from pagewire.kernels.reference.route import route as route_by_torch
from pagewire.kernels.routing import Routing

# (experts, chosen, hidden, inner) of Qwen3-30B-A3B and of Mixtral 8x7B, and tokens
MIXTURES = TABLES["mixtures"]
_MOST_BOUND_BY_BYTES = 256  # tokens


def route_cases() -> Iterator[BenchCase]:
    """Yield cases of routing by the rules of Qwen3-30B-A3B, gpt-oss-120b and DeepSeek-V3.

    The peer is plain torch, with eight launches or more.
    """
    for name, each in TABLES["routing"].items():
        for tokens in (1, 8, 256, 8192):
            shape = f"{tokens} tokens, {name}"
            yield _route(shape, tokens, each["experts"], Routing(**each["rule"]))


def expert_cases() -> Iterator[BenchCase]:
    """Yield cases of the experts: the unit is TB/s at few tokens, TFLOP/s at many."""
    for mixture in MIXTURES:
        yield from (_experts(tokens, *mixture["shape"]) for tokens in mixture["tokens"])


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

    few = tokens <= _MOST_BOUND_BY_BYTES
    nbytes = 2.0 * hidden * (3 * distinct * inner + 2 * tokens)
    return BenchCase(
        "experts",
        f"{tokens} x {hidden}, {top_k} of {num_experts} ({distinct} read), inner {inner}",
        lambda ops: (ops.experts(x, chosen, weights, gate_up, down),),
        work=nbytes if few else 6.0 * tokens * top_k * hidden * inner,
        unit="TB/s" if few else "TFLOP/s",
    )
