"""Projections with weights in four bits: as the projections of what the weights stand for."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.kernels.four_bit_linear import choose_tiling
from pagewire.kernels.four_bits import FourBitWeights
from pagewire.tests.support.four_bit_weights import moved, random_weights

# rows, out and in features, kind and inputs of a group
SHAPES = {
    "one-row": (1, 128, 256, "integers", 128),
    "few-rows-many-ranges": (3, 64, 1024, "integers", 128),
    "ragged": (18, 75, 173, "integers", 32),
    "ragged-groups-of-64": (5, 33, 200, "integers", 64),
    "odd-groups": (9, 40, 90, "integers", 24),
    "groups-of-16": (2, 40, 80, "integers", 16),
    "groups-of-two-tiles": (4, 64, 600, "integers", 256),
    "one-group": (7, 70, 301, "integers", 301),
    "e2m1": (3, 96, 224, "e2m1", 32),
    "e2m1-ranges": (6, 64, 1056, "e2m1", 32),
    "two-tiles-of-rows": (130, 70, 160, "integers", 32),
    "many-rows": (270, 40, 150, "integers", 50),
    "many-rows-e2m1": (260, 33, 96, "e2m1", 32),
    "nothing": (0, 40, 64, "integers", 32),
}
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def biased(weights: FourBitWeights, dtype: torch.dtype) -> FourBitWeights:
    return weights._replace(bias=torch.randn(len(weights.pairs)).to(dtype))


@EACH_SHAPE
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["usual", "invariant"])
def test_products_of_what_weights_stand_for(
    device, dtype, shape, batch_invariant, assert_close
) -> None:
    rows, outs, ins, kind, group = shape
    weights, meant = random_weights((outs, ins), kind, group, dtype)
    x = torch.randn(rows, ins + 3, dtype=dtype)[:, :ins]
    kernels = load_ops("triton", "cuda", batch_invariant)
    reference = load_ops("torch", "cpu", batch_invariant)
    for own in (weights, biased(weights, dtype)):
        expected = reference.linear(x, meant, own.bias)
        assert torch.equal(reference.four_bit_linear(x, own), expected)
        actual = kernels.four_bit_linear(x.to(device), moved(own, device))
        assert actual.dtype == dtype
        assert_close(actual.cpu(), expected)
        out = torch.empty((rows, outs), dtype=dtype, device=device)
        assert kernels.four_bit_linear(x.to(device), moved(own, device), out) is out
        assert torch.equal(out, actual)


@pytest.mark.parametrize("rows", [100, 160], ids=["in-registers", "in-memory"])
@pytest.mark.parametrize(("kind", "group"), [("integers", 32), ("integers", 40), ("e2m1", 32)])
def test_weights_are_exactly_what_they_stand_for(device, rows, kind, group) -> None:
    weights, meant = random_weights((50, 160), kind, group, torch.float32)
    one_of_each = torch.eye(160, device=device)[:rows]
    y = load_ops("triton", "cuda").four_bit_linear(one_of_each, moved(weights, device))
    assert torch.equal(y.cpu(), meant.T[:rows])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_does_not_depend_on_others_in_invariant_mode(device, backend) -> None:
    weights, _ = random_weights((40, 96), "integers", 32, torch.float32)
    x = torch.randn(140, 96, device=device)
    project = load_ops(backend, device, batch_invariant=True).four_bit_linear
    together = project(x, moved(weights, device))
    for rows in (slice(0, 1), slice(1, 4), slice(4, 140)):
        assert torch.equal(together[rows], project(x[rows], moved(weights, device)))


@pytest.mark.parametrize("rows", [7, 130])
def test_rows_may_have_gaps(device, rows, assert_close) -> None:
    weights, meant = random_weights((40, 96), "integers", 32, torch.float32)
    x = torch.randn(96, rows).t()
    y = load_ops("triton", "cuda").four_bit_linear(x.to(device), moved(weights, device))
    assert_close(y.cpu(), x @ meant.T)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (16, (64, 256, 4, 3, 4)),
        (32, (128, 128, 4, 3, 4)),
        (33, (128, 64, 4, 4, 4)),
        (64, (128, 64, 4, 4, 4)),
        (65, (128, 128, 2, 3, 8)),
    ],
)
def test_choice_of_tilings(rows, expected) -> None:
    assert choose_tiling(rows, 8192, 8192, 132, 2) == expected
