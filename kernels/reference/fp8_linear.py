"""Products with weights in FP8, in plain torch: of the numbers that FP8 stands for, in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pagewire.kernels.fp8_numbers import LARGEST, LEAST_SCALE, Fp8Weights


def dequantised(weights: Fp8Weights) -> torch.Tensor:
    """Return what weights stand for, `[..., out, in]` float32."""
    (outs, ins), (rows, columns) = weights.numbers.shape[-2:], weights.block
    scale = weights.scale
    if scale.shape[-2] < outs:
        scale = scale.repeat_interleave(rows, -2)[..., :outs, :]
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(columns, -1)[..., :ins]
    return weights.numbers.float() * scale


def rounded(x: torch.Tensor, weights: Fp8Weights) -> torch.Tensor:
    """Return inputs `[T, in]` of weights as FP8 with scales stands for them, in float32."""
    x = x.float()
    if weights.input_scale is not None:
        scale = weights.input_scale
    else:
        columns = weights.block[1]
        groups = F.pad(x, (0, -x.shape[1] % columns)).unflatten(1, (-1, columns))
        scale = groups.abs().amax(2).div(LARGEST).clamp(min=LEAST_SCALE)
        scale = scale.repeat_interleave(columns, 1)[:, : x.shape[1]]
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def fp8_linear(
    x: torch.Tensor,
    weights: Fp8Weights,
    quantises_inputs: bool = True,
    out: torch.Tensor | None = None,
    product: Callable[..., torch.Tensor] = F.linear,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`; see `pagewire.kernels.Fp8Linear`.

    `product(x, weight, bias)` is a projection, as `linear` is.
    """
    meant, bias = dequantised(weights), weights.bias
    if quantises_inputs:
        bias = None if bias is None else bias.float()
        y = product(rounded(x, weights), meant, bias).to(x.dtype)
    else:
        y = product(x, meant.to(x.dtype), bias)
    return y if out is None else out.copy_(y)
