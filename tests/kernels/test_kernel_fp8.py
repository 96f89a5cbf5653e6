"""Products of quantised inputs with weights in FP8, of projections and of experts.

Inputs are numbers of e4m3 whose largest is the largest of all, which convert exactly.
"""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels import load_ops
from pagewire.kernels.fp8_few_rows import choose_split
from pagewire.kernels.fp8_inputs import quantise
from pagewire.kernels.fp8_numbers import LARGEST, Fp8Weights
from pagewire.kernels.gated_silu import SILU, GatedSilu
from pagewire.kernels.reference.fp8_linear import dequantised, rounded

E4M3 = torch.float8_e4m3fn
# rows, outputs, inputs, rows and columns of a block, bias, whether inputs have a given scale
SHAPES = {
    "one-row": (1, 64, 128, 1, 128, False, False),
    "few-rows": (5, 192, 1024, 1, 1024, True, False),
    "few-rows-blocks": (33, 128, 512, 128, 128, True, False),
    "few-rows-given-scale": (2, 64, 768, 1, 768, False, True),
    "rows": (37, 70, 200, 1, 200, True, False),
    "given-scale": (5, 80, 136, 1, 136, True, True),
    "blocks": (5, 140, 200, 128, 128, True, False),
    "small-blocks": (20, 30, 72, 20, 32, False, False),
    "large-blocks": (3, 40, 300, 64, 256, False, False),
    "blocks-given-scale": (4, 48, 160, 16, 32, False, True),
    "nothing": (0, 64, 128, 1, 128, False, False),
}
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def numbers_of_e4m3(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 60).clamp(-LARGEST, LARGEST).to(E4M3)


def inputs(rows: int, ins: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return inputs that are numbers of e4m3 times a power of two, of each row and block."""
    x = numbers_of_e4m3(rows, ins).float()
    for first in range(0, ins, columns):
        x[:, first] = LARGEST
        x[:, first : first + columns] *= torch.randint(-6, -2, (rows, 1)).exp2()
    return x.to(dtype)


def weights(
    *outs_ins: int, block: tuple[int, int], has_bias: bool, has_scale: bool, dtype: torch.dtype
) -> Fp8Weights:
    *experts, outs, ins = outs_ins
    scales = (*experts, -(-outs // block[0]), -(-ins // block[1]))
    return Fp8Weights(
        numbers_of_e4m3(*experts, outs, ins),
        torch.rand(scales) / (100 * ins**0.5),
        block,
        torch.randn(*experts, outs).to(dtype) if has_bias else None,
        torch.full((experts[0] if experts else 1,), 0.25) if has_scale else None,
    )


def moved(of: Fp8Weights, device: str) -> Fp8Weights:
    return Fp8Weights(*(each.to(device) if isinstance(each, torch.Tensor) else each for each in of))


@EACH_SHAPE
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["usual", "invariant"])
def test_products_of_quantised_inputs(device, dtype, shape, batch_invariant, assert_close) -> None:
    rows, outs, ins, *block, has_bias, has_scale = shape
    own = weights(
        outs, ins, block=tuple(block), has_bias=has_bias, has_scale=has_scale, dtype=dtype
    )
    x = inputs(rows, ins, block[1], dtype)
    expected = rounded(x, own) @ dequantised(own).T
    expected = (expected if own.bias is None else expected + own.bias.float()).to(dtype)
    reference = load_ops("torch", "cpu", batch_invariant).fp8_linear(x, own)
    assert_close(reference, expected)
    kernels = load_ops("triton", "cuda", batch_invariant)
    actual = kernels.fp8_linear(x.to(device), moved(own, device))
    assert actual.dtype == dtype
    # A GPU adds products of FP8 numbers less exactly than float32 could keep them.
    kept = torch.float16 if device == "cuda" and dtype == torch.float32 else dtype
    assert_close(actual.cpu().to(kept), expected.to(kept))
    out = torch.empty_like(actual)
    assert kernels.fp8_linear(x.to(device), moved(own, device), out=out) is out
    assert torch.equal(out, actual)


@pytest.mark.gpu
@EACH_SHAPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_any_inputs_on_a_gpu(shape, dtype, assert_close) -> None:
    """Where conversions are exact, and cuBLAS computes what it can."""
    rows, outs, ins, *block, has_bias, has_scale = shape
    own = weights(
        outs, ins, block=tuple(block), has_bias=has_bias, has_scale=has_scale, dtype=dtype
    )
    x = torch.randn(rows, ins).to(dtype)
    actual = load_ops("triton", "cuda").fp8_linear(x.cuda(), moved(own, "cuda"))
    assert_close(actual.cpu(), load_ops("torch", "cpu").fp8_linear(x, own))
    found = quantise(
        x.cuda(), block[1], None if own.input_scale is None else own.input_scale.cuda()
    )
    columns = torch.arange(ins) // block[1]
    assert torch.equal(found.numbers.float().cpu() * found.scale.cpu()[:, columns], rounded(x, own))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_inputs_that_are_not_quantised(backend: str, assert_close) -> None:
    own = weights(40, 96, block=(8, 32), has_bias=True, has_scale=False, dtype=torch.float32)
    x = torch.randn(5, 96)
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    actual = load_ops(backend, device).fp8_linear(x.to(device), moved(own, device), False)
    assert own.bias is not None
    assert_close(actual.cpu(), x @ dequantised(own).T + own.bias)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("columns", [32, 96])
def test_rows_of_zeros_and_of_nan_stay_so(backend: str, columns: int) -> None:
    own = weights(16, 96, block=(1, columns), has_bias=False, has_scale=False, dtype=torch.float16)
    x = torch.ones(3, 96, dtype=torch.float16)
    x[0], x[1, 50] = 0, torch.nan
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    y = load_ops(backend, device).fp8_linear(x.to(device), moved(own, device)).cpu()
    assert (y[0] == 0).all() and y[1].isnan().all() and y[2].isfinite().all()


def test_a_row_does_not_depend_on_others_in_invariant_mode(device) -> None:
    own = moved(
        weights(40, 256, block=(32, 128), has_bias=True, has_scale=False, dtype=torch.float16),
        device,
    )
    x = torch.randn(70, 256, dtype=torch.float16, device=device)
    project = load_ops("triton", "cuda", batch_invariant=True).fp8_linear
    together = project(x, own)
    assert torch.equal(torch.cat([project(x[:1], own), project(x[1:], own)]), together)


@pytest.mark.parametrize(
    ("block", "inner_block", "has_scale"),
    [((1, 64), (1, 40), False), ((8, 32), (16, 32), False), ((1, 64), (1, 40), True)],
    ids=["rows", "blocks", "given-scale"],
)
@pytest.mark.parametrize(
    ("tokens", "batch_invariant", "oss"),
    [(1, False, False), (40, False, True), (6, True, False)],
    ids=["one", "gpt-oss", "invariant"],
)
def test_experts(
    device, block, inner_block, has_scale, tokens, batch_invariant, oss, assert_close
) -> None:
    """Inputs of the second projections are any, of which the interpreter converts 2 % wrongly."""
    dtype, experts, hidden, inner, top_k = torch.float16, 6, 64, 40, 2
    options = {"has_bias": oss, "has_scale": has_scale, "dtype": dtype}
    first = weights(experts, 2 * inner, hidden, block=block, **options)
    second = weights(experts, hidden, inner, block=inner_block, **options)
    if has_scale:
        second = second._replace(input_scale=torch.rand(experts) / 50 + 0.01)
    x = inputs(tokens, hidden, block[1], dtype)
    best = torch.randn(tokens, experts).topk(top_k)
    routed = best.indices.int(), best.values.softmax(-1)
    activation = GatedSilu(alpha=1.702, up_offset=1.0, limit=7.0) if oss else SILU
    total = torch.zeros(tokens, hidden)
    for row in range(tokens):
        for expert, weight in zip(*(each[row].tolist() for each in routed), strict=True):
            both = _project(x[row : row + 1], first.expert(expert)).float()
            gate, up = (both[:, ::2], both[:, 1::2]) if oss else both.chunk(2, dim=1)
            if activation.limit is not None:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            gated = gate * torch.sigmoid(activation.alpha * gate) * (up + activation.up_offset)
            total[row] += weight * _project(gated.to(dtype), second.expert(expert))[0].float()
    reference = load_ops("torch", "cpu", batch_invariant)
    options = {"activation": activation, "interleaved": oss}
    assert_close(reference.fp8_experts(x, *routed, first, second, **options), total.to(dtype))
    kernels = load_ops("triton", "cuda", batch_invariant)
    on_device = (moved(each, device) for each in (first, second))
    chosen, shares = (each.to(device) for each in routed)
    actual = kernels.fp8_experts(x.to(device), chosen, shares, *on_device, **options)
    error = (actual.cpu().float() - total).norm() / total.norm()
    assert error < (0.2 if device == "cpu" else 3e-3)


def _project(x: torch.Tensor, own: Fp8Weights) -> torch.Tensor:
    y = rounded(x, own) @ dequantised(own).T
    return (y if own.bias is None else y + own.bias.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("rows", "outs", "expected"),
    [(1, 4096, 2), (16, 4096, 2), (17, 4096, 1), (64, 4096, 1), (17, 1024, 4), (16, 28672, 1)],
)
def test_more_rows_have_fewer_splits(rows: int, outs: int, expected: int) -> None:
    assert choose_split(rows, outs, 14336, 132) == expected


@pytest.mark.parametrize(("rows", "outs"), [(0, 4096), (65, 4096), (8, 4100)])
def test_other_shapes_have_another_kernel(rows: int, outs: int) -> None:
    assert choose_split(rows, outs, 14336, 132) is None
