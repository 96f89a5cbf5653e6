"""Matrix products of few rows in Triton against torch."""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.linear import MOST_ROWS, choose_split

H200_SMS = 132
SHAPES_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))


def _operands(rows, outs, ins, device, dtype):
    x = torch.randn(rows, ins, device=device).to(dtype)
    weight = (torch.randn(outs, ins, device=device) / ins**0.5).to(dtype)
    return x, weight


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 17, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize(("outs", "ins"), [(64, 1024), (192, 256), (320, 384), (100, 128)])
def test_linear(rows, outs, ins, with_bias, device, dtype, kernels, reference, assert_close):
    x, weight = _operands(rows, outs, ins, device, dtype)
    bias = torch.randn(outs, device=device).to(dtype) if with_bias else None
    assert_close(kernels.linear(x, weight, bias), reference.linear(x, weight, bias))


def test_linear_of_strided_rows(device, kernels, reference, assert_close):
    x, weight = _operands(6, 64, 512, device, torch.float16)
    wide = torch.cat([x, x], dim=1)[::2, 512:]
    assert_close(kernels.linear(wide, weight), reference.linear(x[::2], weight))


def test_linear_with_a_bias_that_has_gaps(device, kernels, reference, assert_close):
    x, weight = _operands(6, 64, 512, device, torch.float16)
    bias = torch.randn(64, 2, device=device).to(torch.float16)[:, 0]
    assert_close(kernels.linear(x, weight, bias), reference.linear(x, weight, bias))


def test_splits_are_added_up_again_and_again(device, kernels):
    assert choose_split(3, 64, 1024, 4) == 4
    x, weight = _operands(3, 64, 1024, device, torch.float16)
    first = kernels.linear(x, weight)
    for _ in range(3):
        assert torch.equal(kernels.linear(x, weight), first)


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outs", [64, 100], ids=["tiled", "cublas"])
def test_out_is_written(outs, with_bias, backend, request, device, assert_close):
    ops = request.getfixturevalue(backend)
    x, weight = _operands(3, outs, 128, device, torch.float16)
    bias = weight[:, 0].contiguous() if with_bias else None
    out = torch.empty(8, outs, device=device, dtype=x.dtype)[:3]
    assert ops.linear(x, weight, bias, out=out) is out
    assert_close(out, ops.linear(x, weight, bias))


def test_programs_fill_the_sms():
    for rows in (1, 16, 17, MOST_ROWS):
        for outs, ins in SHAPES_8B:
            split_k = choose_split(rows, outs, ins, H200_SMS)
            assert split_k is not None
            assert ins % (split_k * 128) == 0
            assert outs // 64 * split_k >= 0.8 * H200_SMS


@pytest.mark.parametrize(
    ("rows", "outs", "ins"), [(33, 28672, 4096), (0, 4096, 4096), (1, 100, 128), (1, 64, 100)]
)
def test_other_shapes_are_cublas_matter(rows, outs, ins):
    assert choose_split(rows, outs, ins, H200_SMS) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
@pytest.mark.parametrize(("outs", "ins"), SHAPES_8B)
def test_linear_at_8b_size(outs, ins, rows, dtype, kernels, reference, assert_close):
    x, weight = _operands(rows, outs, ins, "cuda", dtype)
    assert_close(kernels.linear(x, weight), reference.linear(x, weight))
