"""Routing of tokens to experts in Triton against the torch reference."""

from __future__ import annotations

import math

import pytest
import torch

from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.route import route
from pagewire.kernels.routing import Routing

V3 = Routing(
    top_k=4,
    scores="sigmoid",
    renormalise=True,
    scale=2.5,
    groups=6,
    top_groups=2,
    group_score="best two",
    corrected=True,
)
# experts and rule
RULES = {
    "qwen3": (128, Routing(top_k=8, renormalise=True)),
    "mixtral": (8, Routing(top_k=2, renormalise=True)),
    "deepseek-v2": (24, Routing(top_k=4, scale=16.0, groups=6, top_groups=2)),
    "deepseek-v3": (24, V3),
    "one-expert": (1, Routing(top_k=1)),
    "odd": (13, Routing(top_k=5, scale=0.3)),
    "all": (7, Routing(top_k=7, scores="sigmoid")),
    "odd-groups": (15, Routing(top_k=5, groups=5, top_groups=3, group_score="best two")),
    "corrected-softmax": (10, Routing(top_k=3, corrected=True, renormalise=True)),
    "many": (500, Routing(top_k=64, scores="sigmoid", renormalise=True)),
}


def _compare(kernels, reference, logits, routing, correction):
    chosen, weights = kernels.route(logits, routing, correction)
    expected_chosen, expected_weights = reference.route(logits, routing, correction)
    assert chosen.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(chosen, expected_chosen)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize(("num_experts", "routing"), RULES.values(), ids=RULES)
def test_matches_reference(num_experts, routing, tokens, device, dtype, kernels, reference):
    logits = torch.randn(tokens, num_experts, device=device).to(dtype)
    correction = torch.randn(num_experts, device=device) if routing.corrected else None
    _compare(kernels, reference, logits, routing, correction)


@pytest.mark.parametrize(("num_experts", "routing"), RULES.values(), ids=RULES)
def test_of_equal_scores_the_first_come_first(num_experts, routing, device, kernels, reference):
    """Three values of logits, all of whose sums are different."""
    drawn = torch.randint(3, (8, num_experts), device=device)
    logits = torch.tensor([-0.7, 0.1, 1.3], device=device)[drawn]
    correction = torch.zeros(num_experts, device=device) if routing.corrected else None
    _compare(kernels, reference, logits, routing, correction)
    chosen, _ = kernels.route(torch.zeros_like(logits), routing, correction)
    assert torch.equal(chosen, torch.arange(routing.top_k).int().expand(8, -1).to(device))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # interpreter's
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_experts_are_different_whatever_the_logits_are(scores, device, kernels, reference):
    logits = torch.tensor([[math.nan] * 5, [-math.inf, math.nan, 3.0, -2.0, math.inf]])
    routing = Routing(top_k=4, scores=scores)
    chosen, _ = kernels.route(logits.to(device), routing)
    assert torch.equal(chosen, reference.route(logits.to(device), routing)[0])
    assert chosen[0].tolist() == [0, 1, 2, 3]
    assert chosen[1].tolist() == [4, 2, 3, 0]


def test_outside_of_the_best_groups_only_if_these_are_too_small(device, kernels, reference):
    logits = torch.tensor([[1.0, 2.0, 5.0, 0.0, 3.0, 4.0]], device=device)
    routing = Routing(top_k=3, groups=3, top_groups=1)
    _compare(kernels, reference, logits, routing, None)
    assert kernels.route(logits, routing)[0].tolist() == [[2, 3, 0]]


def test_strided_rows(device, kernels, reference):
    logits = torch.randn(18, 40, device=device)[::2, 7:31]
    _compare(kernels, reference, logits, V3, torch.randn(24, device=device))


@pytest.mark.gpu
def test_a_softmax_over_many_experts(kernels, reference):
    logits = torch.randn(300, 16384, device="cuda")
    _compare(kernels, reference, logits, Routing(top_k=64, renormalise=True), None)


def test_a_token_has_the_same_bits_in_any_batch(device, dtype, kernels):
    logits, correction = torch.randn(5, 24, device=device).to(dtype), torch.randn(24).to(device)
    together = kernels.route(logits, V3, correction)
    for token in range(5):
        own = slice(token, token + 1)
        alone = kernels.route(logits[own], V3, correction)
        assert all(torch.equal(a, b[own]) for a, b in zip(alone, together, strict=True))


def test_what_it_does_not_take_is_refused():
    with pytest.raises(UnsupportedShapeError, match="40000 experts in groups of 20000"):
        route(torch.zeros(1, 40000), Routing(top_k=2, groups=2, top_groups=1))
    with pytest.raises(UnsupportedShapeError, match="stride 1"):
        route(torch.zeros(8, 2).t(), Routing(top_k=2))
    with pytest.raises(UnsupportedShapeError, match="stride 1"):
        route(torch.zeros(2, 8), Routing(top_k=2, corrected=True), torch.zeros(16)[::2])
