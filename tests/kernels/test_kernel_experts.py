"""Mixtures of experts in Triton against the torch reference, and the tile list they are cut by."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.errors import UnsupportedShapeError
from pagewire.kernels.expert_tiles import list_tiles, most_tiles
from pagewire.kernels.experts import experts
from pagewire.kernels.few_experts import are_few
from pagewire.kernels.gated_silu import GatedSilu

CLAMPED = GatedSilu(alpha=1.702, up_offset=1.0, limit=0.7)
# tokens, experts, chosen by a token, hidden size, inner size
SHAPES = {
    "one-token": (1, 4, 2, 32, 16),
    "one-token-of-odd-sizes": (1, 5, 3, 37, 19),
    "one-token-of-one-expert": (1, 1, 1, 48, 24),
    "one-token-of-all-experts": (1, 9, 9, 37, 130),
    "one-token-in-several-steps": (1, 5, 3, 262, 270),
    "few-tokens": (3, 24, 4, 40, 70),
    "few-tokens-of-one-expert-each": (5, 11, 1, 33, 48),
    "no-tokens": (0, 4, 2, 32, 16),
    "one-expert": (5, 1, 1, 48, 24),
    "odd-sizes": (7, 5, 3, 37, 19),
    "all-experts": (9, 6, 6, 70, 33),
    "several-tiles": (75, 3, 2, 40, 100),
    "tiles-of-128": (300, 2, 1, 24, 40),
    "several-tiles-of-128": (300, 2, 2, 72, 136),
    "many-experts": (9, 130, 8, 16, 8),
}


def _parameters(num_experts, hidden, inner, device, dtype, biases=False):
    shapes = [(2 * inner, hidden), (hidden, inner), (2 * inner,), (hidden,)]
    scales = [hidden**-0.5, inner**-0.5, 0.5, 0.5]
    made = [
        (torch.randn(num_experts, *shape, device=device) * scale).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    return made if biases else made[:2]


def _route(tokens, num_experts, top_k, device):
    """Return experts that are all different for a token, and weights that add up to 1."""
    scores = torch.randn(tokens, num_experts, device=device)
    best = scores.topk(top_k)
    return best.indices.int(), best.values.softmax(dim=-1)


def _expected(reference, x, routing, parameters, **options):
    """Return what the reference gives in float32, rounded once.

    In a narrower dtype it also rounds gates and ups, which the kernels do not, and the two then
    differ by more than either's own error.
    """
    wide = (each.float() for each in parameters)
    return reference.experts(x.float(), *routing, *wide, **options).to(x.dtype)


@pytest.mark.parametrize(
    "wide_has_biases",
    [True, pytest.param(False, marks=pytest.mark.exhaustive)],
    ids=["biases-if-float32", "biases-if-narrower"],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_experts(shape, wide_has_biases, device, dtype, kernels, reference, assert_close):
    biases = (dtype == torch.float32) == wide_has_biases
    tokens, num_experts, top_k, hidden, inner = shape
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    routing = _route(tokens, num_experts, top_k, device)
    parameters = _parameters(num_experts, hidden, inner, device, dtype, biases)
    actual = kernels.experts(x, *routing, *parameters)
    assert_close(actual, _expected(reference, x, routing, parameters))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    "activation",
    [CLAMPED, GatedSilu(limit=0.3), GatedSilu(alpha=0.5, up_offset=-2.0)],
    ids=["clamped", "limited", "other-constants"],
)
def test_activations(activation, interleaved, device, dtype, kernels, reference, assert_close):
    x = torch.randn(11, 40, device=device).to(dtype)
    routing = _route(11, 5, 2, device)
    parameters = _parameters(5, 40, 24, device, dtype, biases=True)
    options = {"activation": activation, "interleaved": interleaved}
    actual = kernels.experts(x, *routing, *parameters, **options)
    expected = _expected(reference, x, routing, parameters, **options)
    assert_close(actual, expected)
    assert not torch.equal(expected, _expected(reference, x, routing, parameters))


@pytest.mark.parametrize("activation", [GatedSilu(), CLAMPED], ids=["plain", "clamped"])
@pytest.mark.parametrize("num_experts", [4, 24], ids=["in-tiles", "few"])
def test_what_is_not_a_number_stays_so_in_its_row(
    num_experts, activation, device, dtype, kernels, reference
):
    """A limit does not make a number of it."""
    x = torch.randn(3, 40, device=device).to(dtype)
    chosen, weights = _route(3, num_experts, 2, device)
    arguments = (chosen, weights, *_parameters(num_experts, 40, 24, device, dtype))
    whole = kernels.experts(x, *arguments, activation=activation)
    x[1, 5] = torch.nan
    assert reference.experts(x, *arguments, activation=activation)[1].isnan().all()
    actual = kernels.experts(x, *arguments, activation=activation)
    assert actual[1].isnan().all()
    assert torch.equal(actual[::2], whole[::2])


def test_all_tokens_to_one_expert(device, dtype, kernels, reference, assert_close):
    x = torch.randn(70, 32, device=device).to(dtype)
    chosen = torch.tensor([[2, 0]], device=device, dtype=torch.int32).expand(70, 2)
    weights = torch.tensor([[0.9, 0.2]], device=device).expand(70, 2)
    parameters = _parameters(4, 32, 16, device, dtype)
    parameters[0][1::2] = torch.nan  # nobody's experts
    actual = kernels.experts(x, chosen, weights, *parameters)
    assert_close(actual, _expected(reference, x, (chosen, weights), parameters))


def test_strided_rows(device, kernels, reference, assert_close):
    x = torch.randn(18, 80, device=device)[::2, 7:47]
    arguments = (*_route(9, 4, 2, device), *_parameters(4, 40, 24, device, torch.float32))
    assert_close(kernels.experts(x, *arguments), reference.experts(x, *arguments))


def test_few_tokens_of_one_expert(device, dtype, kernels, reference, assert_close):
    """They share it, and no other's weights are read."""
    x = torch.randn(3, 40, device=device).to(dtype)
    chosen = torch.tensor([[7]], device=device, dtype=torch.int32).expand(3, 1)
    weights = torch.tensor([[0.9], [-0.2], [3.0]], device=device)
    parameters = _parameters(8, 40, 24, device, dtype)
    parameters[0][:7] = torch.nan
    actual = kernels.experts(x, chosen, weights, *parameters)
    assert_close(actual, _expected(reference, x, (chosen, weights), parameters))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_activations_of_few_tokens(interleaved, device, dtype, kernels, reference, assert_close):
    x = torch.randn(2, 40, device=device).to(dtype)
    routing = _route(2, 8, 2, device)
    parameters = _parameters(8, 40, 24, device, dtype, biases=True)
    options = {"activation": CLAMPED, "interleaved": interleaved}
    actual = kernels.experts(x, *routing, *parameters, **options)
    assert_close(actual, _expected(reference, x, routing, parameters, **options))


@pytest.mark.parametrize("num_experts", [4, 24], ids=["in-tiles", "few"])
def test_a_token_has_the_same_bits_in_any_batch(num_experts, device, dtype, kernels):
    """With few tokens each is computed alone; else in tiles of as many rows, anywhere in them."""
    x = torch.randn(6, 48, device=device).to(dtype)
    chosen, weights = _route(6, num_experts, 2, device)
    parameters = _parameters(num_experts, 48, 32, device, dtype)
    together = kernels.experts(x, chosen, weights, *parameters)
    for first in range(0, 6, 2):
        own = slice(first, first + 2)
        alone = kernels.experts(x[own], chosen[own], weights[own], *parameters)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "few"),
    [
        pytest.param(1, 128, 8, True, id="qwen3-1"),
        pytest.param(8, 128, 8, True, id="qwen3-8"),
        pytest.param(9, 128, 8, False, id="qwen3-9"),
        pytest.param(1, 8, 2, True, id="mixtral-1"),
        pytest.param(3, 8, 2, False, id="mixtral-3"),
        pytest.param(1, 6, 6, True, id="all-experts"),
        pytest.param(1, 256, 65, False, id="more-chosen-than-registers"),
    ],
)
def test_which_tokens_are_few(tokens, num_experts, top_k, few):
    assert are_few(tokens, top_k, num_experts) == few


def test_the_reference_is_the_sum_over_experts_written_out(reference):
    x = torch.randn(3, 8, dtype=torch.float32)
    chosen, weights = _route(3, 4, 2, "cpu")
    gate_up, down, gate_up_bias, down_bias = _parameters(4, 8, 6, "cpu", torch.float32, biases=True)
    expected = torch.zeros(3, 8)
    for token in range(3):
        for choice in range(2):
            expert = int(chosen[token, choice])
            inner = gate_up[expert] @ x[token] + gate_up_bias[expert]
            inner = torch.nn.functional.silu(inner[:6]) * inner[6:]
            out = down[expert] @ inner + down_bias[expert]
            expected[token] += weights[token, choice] * out
    actual = reference.experts(x, chosen, weights, gate_up, down, gate_up_bias, down_bias)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"), [(1, 3, 2), (40, 7, 3), (2100, 5, 2), (33, 1, 1), (2, 9, 9)]
)
def test_tile_list(tokens, num_experts, top_k, rows, device):
    """Each pair is in one tile of its expert, and pairs of one expert stay in their order."""
    chosen, _ = _route(tokens, num_experts, top_k, device)
    listed = list_tiles(chosen, num_experts, rows)
    flat = chosen.flatten()
    assert torch.equal(listed.order, flat.argsort(stable=True).int())
    expected = []
    ends = flat.bincount(minlength=num_experts).cumsum(0).tolist()
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        expected += [[expert, p, min(p + rows, end)] for p in range(start, end, rows)]
    tiles = listed.tiles.tolist()
    assert tiles[: len(expected)] == expected
    assert all(tile[0] == -1 for tile in tiles[len(expected) :])


@pytest.mark.parametrize("rows", [16, 128])
def test_there_are_never_more_tiles_than_room_for_them(rows):
    for pairs in range(1, 200):
        for num_experts in range(1, 12):
            # The worst routing: single pairs as often as possible, the others in whole tiles.
            lone = min(pairs, num_experts)
            counts = [1] * lone
            counts[0] += pairs - lone
            spread = [pairs // num_experts + (n < pairs % num_experts) for n in range(num_experts)]
            for each in counts, spread:
                used = sum(-(-count // rows) for count in each)
                assert used <= most_tiles(pairs, num_experts, rows)


def test_weights_with_gaps_are_refused():
    x = torch.randn(2, 16)
    chosen, weights = _route(2, 4, 2, "cpu")
    gate_up, down = _parameters(4, 16, 8, "cpu", torch.float32)
    for wrong in (
        (x, chosen, weights, gate_up[::2], down),
        (x, chosen, weights, gate_up, down.transpose(1, 2)),
        (x.t().contiguous().t(), chosen, weights, gate_up, down),
    ):
        with pytest.raises(UnsupportedShapeError, match="without gaps"):
            experts(*wrong)
