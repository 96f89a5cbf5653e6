"""Experts with weights in four bits: as the experts of what the weights stand for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.four_bits import FourBitWeights
from pagewire.kernels.gated_silu import SILU, GatedSilu
from pagewire.kernels.reference import four_bits
from pagewire.tests.support.four_bit_weights import E2M1, moved, paired, random_weights

OSS = GatedSilu(alpha=1.702, up_offset=1.0, limit=7.0)


@dataclass(frozen=True)
class Shape:
    """A mixture, and how its weights are stored."""

    tokens: int
    experts: int = 6
    top_k: int = 2
    hidden: int = 64
    inner: int = 40
    kind: str = "integers"
    group: int = 32
    oss: bool = False


SHAPES = {
    "one-token": Shape(1, group=8),
    "ragged-groups": Shape(9, hidden=72, inner=33, group=16),
    "group-of-all": Shape(5, group=72, hidden=72),
    "any-order": Shape(17, kind="ordered", group=16),
    "e2m1": Shape(3, kind="e2m1", inner=64),
    "e2m1-gpt-oss": Shape(40, kind="e2m1", hidden=96, inner=160, oss=True),
    "many-tokens-of-an-expert": Shape(130, experts=2, kind="e2m1", inner=32),
    "nothing": Shape(0),
}
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def weights(
    shape: Shape, parts: int, outs: int, ins: int, dtype: torch.dtype
) -> tuple[FourBitWeights, torch.Tensor]:
    """Return random weights of all experts, and what they stand for, in a dtype."""
    order = None
    if shape.kind == "ordered":
        groups = torch.arange(ins) // shape.group
        orders = [groups[torch.randperm(ins)] for _ in range(shape.experts * parts)]
        order = torch.stack(orders).view(shape.experts, parts, ins)
    own, meant = random_weights((shape.experts, outs, ins), shape.kind, shape.group, dtype, order)
    if shape.oss:
        own = own._replace(bias=torch.randn(shape.experts, outs).to(dtype))
    return own, meant


@EACH_SHAPE
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["usual", "invariant"])
def test_experts_of_what_weights_stand_for(
    device, dtype, shape, batch_invariant, assert_close, monkeypatch
) -> None:
    monkeypatch.setattr(four_bits, "DEQUANTISED_AT_A_TIME", 700)  # of which experts have several
    hidden, inner = shape.hidden, shape.inner
    first, meant_first = weights(shape, 2, 2 * inner, hidden, dtype)
    second, meant_second = weights(shape, 1, hidden, inner, dtype)
    x = torch.randn(shape.tokens, hidden + 3, dtype=dtype)[:, :hidden]
    best = torch.randn(shape.tokens, shape.experts).topk(shape.top_k)
    routed = best.indices.int(), best.values.softmax(-1)
    options = {"activation": OSS if shape.oss else SILU, "interleaved": shape.oss}
    reference = load_ops("torch", "cpu", batch_invariant)
    biases = first.bias, second.bias
    expected = reference.experts(x, *routed, meant_first, meant_second, *biases, **options)
    found = reference.four_bit_experts(x, *routed, first, second, **options)
    assert torch.equal(found, expected)
    kernels = load_ops("triton", "cuda", batch_invariant)
    on_device = (moved(each, device) for each in (first, second))
    chosen, shares = (each.to(device) for each in routed)
    actual = kernels.four_bit_experts(x.to(device), chosen, shares, *on_device, **options)
    assert actual.dtype == dtype
    assert_close(actual.cpu(), expected)


@pytest.mark.parametrize(("backend", "tokens", "hidden"), [("torch", 70, 256), ("triton", 20, 64)])
def test_a_row_does_not_depend_on_others_in_invariant_mode(device, backend, tokens, hidden) -> None:
    shape = Shape(tokens, experts=3, kind="e2m1")
    first, _ = weights(shape, 2, 64, hidden, torch.float32)
    second, _ = weights(shape, 1, hidden, 32, torch.float32)
    own = moved(first, device), moved(second, device)
    x = torch.randn(tokens, hidden, device=device)
    best = torch.randn(tokens, 3, device=device).topk(2)
    chosen, shares = best.indices.int(), best.values.softmax(-1)
    experts = load_ops(backend, device, batch_invariant=True).four_bit_experts
    together = experts(x, chosen, shares, *own)
    for rows in (slice(0, 1), slice(1, 4), slice(4, tokens)):
        alone = experts(x[rows], chosen[rows], shares[rows], *own)
        assert torch.equal(together[rows], alone)


def test_every_number_of_e2m1_is_exact(device) -> None:
    """With powers of two as scales, down to what float32 rounds to a smaller number."""
    codes = torch.arange(32) % 16
    pairs = paired(codes).expand(1, 32, 16).contiguous()
    exponents = torch.arange(0, 256, 8)
    exponents[-1] = 251  # 6 * 2 ** 124
    second = FourBitWeights(pairs, exponents.byte().view(1, 32, 1), 32, 32)
    meant = E2M1[codes].double() * (exponents.double() - 127).exp2()[:, None]
    dequantised = four_bits.dequantised(second.expert(0), torch.float32)
    assert torch.equal(dequantised.double(), meant)
    # Tokens of one input each, which is gated by itself: 32 * sigmoid(32) * 32 is 1024.
    ones = 2 * torch.eye(32, dtype=torch.int64)  # the second number is 1
    units = paired(ones).repeat(2, 1)[None]
    first = FourBitWeights(units, torch.full((1, 64, 1), 127, dtype=torch.uint8), 32, 32)
    tokens = 32 * torch.eye(32, device=device)
    chosen = torch.zeros(32, 1, dtype=torch.int32, device=device)
    second = second._replace(scale=second.scale.clamp(8, 240))
    own = moved(first, device), moved(second, device)
    y = load_ops("triton", "cuda").four_bit_experts(tokens, chosen, chosen + 1.0, *own)
    exact = four_bits.dequantised(second.expert(0), torch.float32) * 32**2
    assert torch.equal(y.cpu(), exact.T)


def test_rows_with_gaps_are_refused(device) -> None:
    shape = Shape(2)
    own = [moved(weights(shape, n, outs, ins, torch.float16)[0], device) for n, outs, ins in
           ((2, 80, 64), (1, 64, 40))]  # fmt: skip
    x = torch.randn(2, 128, dtype=torch.float16, device=device)[:, ::2]
    chosen = torch.zeros(2, 1, dtype=torch.int32, device=device)
    with pytest.raises(UnsupportedShapeError, match="rows of stride 1"):
        load_ops("triton", "cuda").four_bit_experts(x, chosen, chosen.float(), *own)
